"""The HTTP application of `pellucid serve`, and the loading of its model.

Its endpoints are OpenAI's completions, `/solve_question`, and `/group`, which returns completions with their rewards
and advantages.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from pellucid import config
from pellucid.algorithm.advantages import compute_advantages_from_grades
from pellucid.algorithm.batch import collect_grades
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config
from pellucid.models import hf_decode
from pellucid.policy.access import ModelAccess
from pellucid.policy.policy import Policy, load_frozen_policy
from pellucid.reporting import run_files
from pellucid.rewards.answers import extract_answer, split_thought
from pellucid.rewards.grading import GradedTask, collect_grader_notices, load_graders
from pellucid.rollout.groups import begins_in_thought
from pellucid.rollout.select import find_decode_fault
from pellucid.serve import middleware
from pellucid.serve.command import ServeCommand
from pellucid.serve.daemon import INSTANCE_VARIABLE, make_url
from pellucid.serve.engine import (
    ChoiceFormatter,
    ServedCompletion,
    ServedModel,
    ServingEngine,
    build_usage,
    enforce_deadline,
    format_question,
    start_generation,
)
from pellucid.serve.middleware import (
    ERROR_HANDLERS,
    LOOPBACK_HOSTS,
    GuardMiddleware,
    RequestError,
    RequestLimitsMiddleware,
    build_error_body,
    make_access_check,
)
from pellucid.serve.schemas import ChatRequest, CompletionRequest, GroupRequest, QuestionRequest, SamplingParams
from pellucid.tasks.gsm8k import SYSTEM_MESSAGES
from pellucid.types import Completion, Group, Progress, Prompt, Reward, Task, UserError, grade_groups, with_split
from pellucid.utils import hardware
from pellucid.utils.plugins import ObjectNotInProcessError
from pellucid.utils.text import escape_controls

_PAGE_PATH = Path(__file__).with_name("page.html")
STREAM_END = "data: [DONE]\n\n"


def make_app(served: ServedModel) -> ASGIApp:
    """Return the application that answers requests to a model."""
    app = FastAPI(title="pellucid", docs_url="/docs", redoc_url=None, exception_handlers=ERROR_HANDLERS)
    started = time.time()
    limited_app = RequestLimitsMiddleware(app, served.body_bytes, served.body_seconds, served.send_seconds)

    @app.get("/health")
    async def health() -> JSONResponse:
        is_ending = served.engine.closed
        state = {
            "status": "ending" if is_ending else "ok",
            "model": served.name,
            "instance": served.instance_id,
            "seconds": round(time.time() - started),
            "requests": limited_app.request_count,
        }
        return JSONResponse(state | served.engine.describe_state(), 503 if is_ending else 200)

    card = {"id": served.name, "object": "model", "created": int(started), "owned_by": "pellucid"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise _make_unknown_model_error(served, name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Response:
        limit = request.max_completion_tokens or request.max_tokens
        return await create_completion(served, request, request.prompt, True, limit)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        prompt = Prompt("text", request.prompt) if isinstance(request.prompt, str) else request.prompt
        return await create_completion(served, request, prompt, False, request.max_tokens)

    @app.post("/solve_question")
    async def solve_question(request: QuestionRequest) -> dict[str, Any]:
        return await _answer_question(served, request.question)

    @app.post("/group")
    async def group(request: GroupRequest) -> dict[str, Any]:
        return await _generate_group(served, request)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE_PATH.read_text().replace("{{model}}", html.escape(served.name)))

    return GuardMiddleware(limited_app, make_access_check(served.hosts, served.token))


# ---------------------------------------------------------------- OpenAI's completions


def _make_unknown_model_error(served: ServedModel, name: str) -> RequestError:
    return RequestError(404, f'the model "{name}" is not served here; "{served.name}" is', "model_not_found")


async def create_completion(
    served: ServedModel,
    request: SamplingParams,
    prompt: Prompt | Sequence[int],
    is_chat: bool,
    max_tokens: int | None,
) -> Response:
    """Return the completions of a prompt, or of its token ids, as JSON or as a stream of events.

    Raises:
        RequestError: The request cannot be answered.
    """
    if request.model not in ("", served.name):
        raise _make_unknown_model_error(served, request.model)
    decoding = await start_generation(served, prompt, request, max_tokens)
    tools = prompt.tools if isinstance(prompt, Prompt) else ()
    choices = ChoiceFormatter(decoding, is_chat, tools, request.top_logprob_count is not None, request.return_token_ids)
    head = build_response_head("chatcmpl" if is_chat else "cmpl", served.name)
    if request.stream:
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        return StreamingResponse(stream_completion(choices, head, with_usage), media_type="text/event-stream")
    answers = await decoding.collect_completions()
    body = {
        "object": "chat.completion" if is_chat else "text_completion",
        "usage": build_usage(len(decoding.prompt_ids), sum(len(answer.tokens) for answer in answers)),
        "choices": list(starmap(choices.build_choice, enumerate(answers))),
    }
    return JSONResponse(head | choices.build_head() | body)


async def stream_completion(choices: ChoiceFormatter, head: dict[str, Any], with_usage: bool) -> AsyncIterator[str]:
    """Yield the answer as server-sent events. An error is an event, too, since the status has been sent by then."""
    decoding, first_only = choices.stream, choices.build_head()
    head |= {"object": "chat.completion.chunk" if choices.is_chat else "text_completion"}
    answers = [ServedCompletion() for _ in range(decoding.request.n)]
    if choices.is_chat:
        for i in range(decoding.request.n):
            opening = choices.assemble_choice(i, {"delta": {"role": "assistant", "content": ""}}, "", ())
            yield format_event(head | first_only | {"choices": [opening]})
            first_only = {}
    try:
        async for piece in decoding:
            row = piece.row_index
            answers[row].append_chunk(piece)
            if choices.tools and not piece.finish_reason:
                continue
            choice = choices.build_final_chunk(row, answers[row]) if choices.tools else choices.build_chunk(piece)
            yield format_event(head | first_only | {"choices": [choice]})
            first_only = {}
    except RequestError as refusal:
        yield format_event(build_error_body(refusal))
    if with_usage:
        usage = build_usage(len(decoding.prompt_ids), sum(len(answer.tokens) for answer in answers))
        yield format_event(head | {"choices": [], "usage": usage})
    yield STREAM_END


def build_response_head(kind: str, model: str) -> dict[str, Any]:
    """Return the fields that every answer begins with."""
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def format_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------- /solve_question and /group


async def _answer_question(served: ServedModel, question: str) -> dict[str, Any]:
    start = time.perf_counter()
    decoding = await start_generation(
        served, Prompt("solve", format_question(served, question)), SamplingParams(temperature=0.0), None
    )
    [answer] = await decoding.collect_completions()
    thinking = begins_in_thought(served.policy, decoding.prompt_ids)
    text = "<think>" + answer.text if thinking else answer.text
    reasoning, final = split_thought(text)[0], extract_answer(text)
    data = {
        "assistant_response": answer.text,
        "reasoning_process": reasoning,
        "final_answer": final,
        "clean_response": re.sub(r"</?(?:think|answer)>", "", answer.text).strip(),
    }
    elapsed = round(1000 * (time.perf_counter() - start))
    return {"code": 0, "elapsed_milliseconds": elapsed, "data": data, "message": "success"}


async def _generate_group(served: ServedModel, request: GroupRequest) -> dict[str, Any]:
    """Return G completions of one prompt, with rewards and advantages if they can be graded."""
    can_grade = served.task is not None and bool(request.answer or not request.question)
    prompt = _make_group_prompt(served, request)
    settings = SamplingParams(n=request.group_size, temperature=request.temperature, seed=request.seed)
    decoding = await start_generation(served, prompt, settings, request.max_tokens, served.group_tokens)
    answers = await decoding.collect_completions()
    thinking = begins_in_thought(served.policy, decoding.prompt_ids)
    completions = [
        Completion(answer.token_ids, answer.logprobs, answer.text, answer.finish_reason == "stop", thinking=thinking)
        for answer in answers
    ]
    async with enforce_deadline(served, decoding.deadline):
        rewards = await _grade_completions(served, prompt, completions) if can_grade else []
    group = Group(prompt, decoding.prompt_ids, tuple(completions), tuple(rewards))
    advantages = compute_group_advantages(served.algorithm, group) if rewards else [None] * len(answers)
    return {
        "question": prompt.question,
        "answer": prompt.answer,
        "prompt": served.policy.decode(decoding.prompt_ids, special=True),
        "completions": [
            {
                "text": answer.text,
                "tokens": len(answer.token_ids),
                "finished": answer.finish_reason == "stop",
                "logprob": sum(answer.logprobs),
                "reward": reward.value if reward and not reward.failed else None,
                "parts": dict(reward.parts) if reward and not reward.failed else {},
                "advantage": advantage,
            }
            for answer, reward, advantage in zip(answers, rewards or [None] * len(answers), advantages, strict=True)
        ],
    }


async def _grade_completions(
    served: ServedModel, prompt: Prompt, completions: Sequence[Completion]
) -> Sequence[Reward]:
    """Return the rewards of the completions of a group. If the client leaves, grading ends after the current reward."""
    assert served.task is not None
    client_left, steps = threading.Event(), served.algorithm.steps
    group = Group(prompt, (), tuple(completions))
    progress = Progress(steps, steps, served.algorithm.prompts_per_step)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            served.grading_pool, _compute_rewards, served.task, group, progress, client_left
        )
    finally:
        client_left.set()


def _compute_rewards(task: Task, group: Group, progress: Progress, client_left: threading.Event) -> Sequence[Reward]:
    if isinstance(task, GradedTask) and task.is_batch_graded:
        return grade_groups(task, [group], progress)[0].rewards
    return [task.reward(group.prompt, completion) for completion in group.completions if not client_left.is_set()]


def _make_group_prompt(served: ServedModel, request: GroupRequest) -> Prompt:
    if request.question:
        return Prompt("group", format_question(served, request.question), request.answer)
    if served.task is None:
        raise RequestError(400, "give a question: this model was not served from a run, so there is no task to ask")
    return served.task.sample(request.number, 1)[0]


def compute_group_advantages(cfg: GRPOConfig, group: Group) -> list[float]:
    grades = collect_grades([group])
    return compute_advantages_from_grades(grades, grades.rewards, cfg)[0].tolist()


# ---------------------------------------------------------------- loading and serving


def serve_model(options: ServeCommand, listening: socket.socket) -> None:
    """Serve a model with the options of the command, until SIGINT or SIGTERM."""
    served = load_served_model(options)
    print(escape_controls(f"{served.name} on {make_url(*listening.getsockname()[:2])}, Ctrl-C ends it"), flush=True)
    server = middleware.make_server(make_app(served))

    def run_server() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            served.engine.close()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, middleware.make_stop_handler(server, served.engine.close))
    threading.Thread(target=run_server, name="http").start()
    try:
        served.engine.run()
    finally:
        server.should_exit = True


def load_served_model(options: ServeCommand) -> ServedModel:
    """Load the policy to serve. A run also provides its task with held-out questions, and algorithm settings."""
    hardware.keep_freed_memory()
    run, model = run_files.find_run_of_model(options.model), run_files.locate_trained_model(options.model)
    settings = _load_run_config(run) if run else None
    policy = _load_served_policy(options, model, run, settings)
    hosts = (name.strip() for name in options.allowed_hosts.split(","))
    return ServedModel(
        name=options.name or Path(os.path.abspath(options.model)).name,
        policy=policy,
        engine=ServingEngine(policy, options.rows),
        task=make_graded_task(settings) if settings else None,
        algorithm=settings.algorithm if settings else GRPOConfig(),
        system=SYSTEM_MESSAGES["en"],
        max_tokens=options.max_tokens,
        group_tokens=settings.sampler.max_tokens if settings else 0,
        timeout=options.timeout,
        body_bytes=options.body_bytes,
        hosts=(*LOOPBACK_HOSTS, options.host, *filter(None, hosts)),
        token=options.token,
        instance_id=os.environ.get(INSTANCE_VARIABLE, ""),
    )


def _load_served_policy(options: ServeCommand, model: str, run: Path | None, settings: Config | None) -> Policy:
    """Load the policy from the folder or the name of a model, and print notes about it."""
    if options.batch_invariant:
        hf_decode.disable_amx()
    device = hardware.pick_device(options.device)
    trusted = options.trust_remote_code or (run is not None and run_files.trusts_remote_code(run))
    access = ModelAccess(options.revision, trusted, "give --trust-remote-code")
    notes = (access.format_warning(options.model), *(collect_grader_notices(settings.task) if settings else ()))
    for note in filter(None, notes):
        print(escape_controls(f"! {note}"), flush=True)
    dtype = hardware.pick_dtype(options.dtype, device)
    adapter = None if dtype == torch.float32 else run_files.find_merged_adapter(model)
    policy = load_frozen_policy(model, device, dtype, temperature=1.0, access=access, merged_adapter=adapter)
    if fault := find_decode_fault(policy):
        kind = type(policy.model).__name__
        raise UserError(f"{options.model}: {kind} cannot be served with continuous batching: {fault}")
    if options.batch_invariant:
        hf_decode.check_batch_invariance(policy, options.rows)
    return policy


def make_graded_task(settings: Config) -> GradedTask:
    """Return the held-out task of a run, with its rewards."""
    return GradedTask(with_split(settings.task, "test"), settings.reward, graders=load_graders(settings.task))


def _load_run_config(run: Path) -> Config | None:
    """Return the settings of a run; None, with a printed note, if its rewards were functions of another process."""
    path = run / "config.json"
    config.check_key_variables(
        config.read_settings(path), (), path, f"serve its model alone: pellucid serve {run / 'model'}"
    )
    try:
        return config.load_config(path)
    except ObjectNotInProcessError as error:
        print(escape_controls(f"! {error}; the model is served without its rewards"), flush=True)
        return None
