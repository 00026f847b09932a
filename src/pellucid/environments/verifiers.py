"""Runs environments of the package `verifiers` unchanged, as agents that query the policy."""

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
_HARNESS_MODULE = "pellucid_chat"
sys.modules[_HARNESS_MODULE] = sys.modules[__name__]  # verifiers finds a harness by a module name without dots


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks the policy, executes its tool calls, and asks again, in this process.

    The harnesses of verifiers start a process with uv for each rollout, which is slow.
    """

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
        first = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += map(message_to_wire, first)
        addresses = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack, openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            tools: list[Any]
            tools, names, servers = await connect_mcp({"mcpServers": addresses}, stack)
            while not messages or messages[-1]["role"] != "assistant":
                request = client.chat.completions.create(model=ctx.model, messages=messages, tools=tools or openai.omit)
                message = (await request).choices[0].message  # also raises after the environment has ended the episode
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    assert call.type == "function"
                    name, arguments = call.function.name, json.loads(call.function.arguments)
                    result = await call_mcp(servers, names, name, arguments) if name in names else f"no tool {name}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(0, "", "")


@dataclass(frozen=True)
class Episode:
    """Runs an episode of a task and returns its reward. row["task"] has the data of the task as JSON values."""

    env_json: str
    """The table `[env]` of verifiers, as JSON."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_episode, (self.env_json,)

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
            raise RuntimeError(errors[0].message if errors else "the episode failed without an error")
        for trace in episode.traces:
            agent = trace.agent
            if not agent.trainable and agent.config.client == policy.client:
                raise ValueError(
                    f"the agent {agent.name} is not trained: give it a client of its own in [task.env.{agent.name}]"
                )
        return fmean(trace.reward for trace in episode.traces if trace.agent.trainable)


def _load_episode(env_json: str) -> Episode:
    """Return an episode. Load its environment here, before any time limit starts."""
    load_environment(env_json)
    return Episode(env_json)


@cache
def load_environment(env_json: str) -> vf.Env:
    """Return the environment of a JSON table `[env]`. Its agents run in this process, by default with `Chat`."""
    table = json.loads(env_json)
    taskset = table.get("taskset", {}).get("id", "")
    kind = vf.env_config_type(taskset, table.get("id", ""))
    defaults: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if vf.default_harness_id(taskset) == "bash":  # the taskset has no harness of its own
        defaults["harness"] = {"id": _HARNESS_MODULE}
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            unset = {key: value for key, value in defaults.items() if key not in field.default.model_fields_set}
            table[name] = unset | table.get(name, {})
    return vf.load_environment(vf.resolve_env_config(table))
