"""Environments of the package `verifiers`, played as they are: an agent that asks the policy in training."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["Chat"]
HARNESS_MODULE = "pellucid_chat"
sys.modules[HARNESS_MODULE] = sys.modules[__name__]  # verifiers finds a harness by a module's name, which has no dots


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks, calls what is called, and asks again, in this process; verifiers' own start one a rollout, with uv."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        begun = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += map(message_to_wire, begun)
        places = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack, openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            tools: list[Any]
            tools, names, servers = await connect_mcp({"mcpServers": places}, stack)
            while not messages or messages[-1]["role"] != "assistant":
                asked = client.chat.completions.create(model=ctx.model, messages=messages, tools=tools or openai.omit)
                said = (await asked).choices[0].message  # or an error, also where the environment has ended it
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or ():
                    assert call.type == "function"
                    name, arguments = call.function.name, json.loads(call.function.arguments)
                    told = await call_mcp(servers, names, name, arguments) if name in names else f"no tool {name}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        return vf.ProgramResult(0, "", "")


@dataclass(frozen=True)
class Episode:
    """Plays a task whose data, as JSON values, is row["task"]; returns what it was worth."""

    env_json: str
    """verifiers' own table `[env]`, as JSON."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_episode, (self.env_json,)

    def __call__(self, row: Mapping[str, Any], client: openai.OpenAI) -> float:
        return asyncio.run(self._run(load_environment(self.env_json), row["task"], str(client.base_url)))

    async def _run(self, env: vf.Env, data: Mapping[str, Any], url: str) -> float:
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
        policy = vf.ModelContext("policy", vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY"))
        async with env.serving():
            episode = await env.run_episode(task, policy)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(errors[0].message if errors else "the episode came to nothing")
        for trace in episode.traces:
            seat = trace.agent
            if not seat.trainable and seat.config.client == policy.client:
                raise ValueError(
                    f"the seat {seat.name} is not trained: give it a client of its own in [task.env.{seat.name}]"
                )
        return fmean(trace.reward for trace in episode.traces if trace.agent.trainable)


def load_episode(env_json: str) -> Episode:
    """Return an episode, its environment being loaded before any time is counted."""
    load_environment(env_json)
    return Episode(env_json)


@cache
def load_environment(env_json: str) -> vf.Env:
    """Return the environment of a table `[env]` in JSON. What no one says of a seat: it is here, and played by Chat."""
    asked = json.loads(env_json)
    taskset = asked.get("taskset", {}).get("id", "")
    kind = vf.env_config_type(taskset, asked.get("id", ""))
    ours: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if vf.default_harness_id(taskset) == "bash":  # it brings none of its own
        ours["harness"] = {"id": HARNESS_MODULE}
    for name, seat in kind.model_fields.items():
        if isinstance(seat.default, vf.AgentConfig):
            unsaid = {key: value for key, value in ours.items() if key not in seat.default.model_fields_set}
            asked[name] = unsaid | asked.get(name, {})
    return vf.load_environment(vf.resolve_env_config(asked))
