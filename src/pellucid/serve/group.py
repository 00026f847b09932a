"""`/group`: a group as training would see it, G completions of one prompt with their rewards and advantages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from pellucid.algorithm.advantages import advantages_of
from pellucid.algorithm.batch import grades_of
from pellucid.algorithm.settings import GRPOConfig
from pellucid.protocols import Task, grade
from pellucid.rewards.graded import Graded
from pellucid.samplers.rollout import begins_in_thought
from pellucid.serve.decoding import Served, asked, begun, in_time
from pellucid.serve.errors import RequestError
from pellucid.serve.messages import GroupRequest, Sampling
from pellucid.types import Completion, Group, Progress, Prompt, Reward


async def group(served: Served, request: GroupRequest) -> dict[str, Any]:
    """Return G completions of one prompt, with rewards and advantages where they can be graded."""
    prompt = group_prompt(served, request)
    settings = Sampling(n=request.group_size, temperature=request.temperature, seed=request.seed)
    decoding = await begun(served, prompt, settings, request.max_tokens, served.group_tokens)
    answers = await decoding.collect_completions()
    thinking = begins_in_thought(served.policy, decoding.prompt_ids)
    completions = [
        Completion(a.token_ids, a.logprobs, a.text, a.finish_reason == "stop", thinking=thinking) for a in answers
    ]
    async with in_time(served, decoding.deadline):
        rewards = await graded(served, prompt, completions) if gradable(served, request) else []
    record = Group(prompt, decoding.prompt_ids, tuple(completions), tuple(rewards))
    compared = advantages(served.algorithm, record) if rewards else [None] * len(answers)
    return {
        "question": prompt.question,
        "answer": prompt.answer,
        "prompt": served.policy.decode(decoding.prompt_ids, special=True),
        "completions": [
            {
                "text": a.text,
                "tokens": len(a.token_ids),
                "finished": a.finish_reason == "stop",
                "logprob": sum(a.logprobs),
                "reward": rewards[i].value if rewards and not rewards[i].failed else None,
                "parts": dict(rewards[i].parts) if rewards and not rewards[i].failed else {},
                "advantage": compared[i],
            }
            for i, a in enumerate(answers)
        ],
    }


def gradable(served: Served, request: GroupRequest) -> bool:
    return served.task is not None and bool(request.answer or not request.question)


async def graded(served: Served, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Reward]:
    """Return the rewards of siblings. Where the client leaves, grading ends after the reward in progress."""
    assert served.task is not None
    left, steps = threading.Event(), served.algorithm.steps
    group = Group(prompt, (), tuple(completions))
    grading = partial(rewards_of, served.task, group, Progress(steps, steps, served.algorithm.prompts_per_step), left)
    try:
        return await asyncio.get_running_loop().run_in_executor(served.grading_pool, grading)
    finally:
        left.set()


def rewards_of(task: Task, group: Group, progress: Progress, left: threading.Event) -> Sequence[Reward]:
    if isinstance(task, Graded) and task.is_batch_graded:
        return grade(task, [group], progress)[0].rewards
    return [task.reward(group.prompt, completion) for completion in group.completions if not left.is_set()]


def group_prompt(served: Served, request: GroupRequest) -> Prompt:
    if request.question:
        return Prompt("group", asked(served, request.question), request.answer)
    if served.task is None:
        raise RequestError(400, "give a question: this model was not served from a run, so there is no task to ask")
    return served.task.sample(request.number, 1)[0]


def advantages(cfg: GRPOConfig, group: Group) -> list[float]:
    grades = grades_of([group])
    return advantages_of(grades, grades.rewards, cfg)[0].tolist()
