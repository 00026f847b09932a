"""Runs the user's agent in a worker process: a function of a data row and a client, or a command.

It calls the policy like any OpenAI-compatible service, at a separate address for each rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from pellucid.environments.worker import WorkerAnswer, encode_worker_answer, seed_generators
from pellucid.sandbox.values import InvalidResultError, validate_number
from pellucid.sandbox.worker import call_user_code, log_error, receive_request, send_answer
from pellucid.utils.plugins import import_extra, load_function

_PLACEHOLDER_API_KEY = "rollout"
"""Clients insist on an API key. The address protects a rollout instead, since nobody can guess it."""
LOOPBACK_HOST = "127.0.0.1"
_FUNCTION_SPEC = re.compile(r"\S+:[^\W\d]\w*")


@dataclass(frozen=True)
class AgentSpec:
    """The agent of a task, and how long it may take.

    Example: AgentSpec("my_agent.py:solve"); AgentSpec("python my_agent.py", timeout=60.0)
    """

    run: str | Callable[..., Any]
    """A function `solve(row, client)`, as "path/to/file.py:name" or one that can be pickled, or a command."""
    timeout: float = 120.0
    """Seconds that the agent may take for a rollout; time in which it waits for the policy does not count."""
    has_rewards: bool = False
    """Whether reward terms grade a conversation if the agent returns no reward."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= 1e6:
            raise ValueError(f"timeout = {self.timeout} must be a positive number of seconds")

    def load_function(self) -> Callable[..., Any] | None:
        """Return the function; None for a command. Raises UserError if the function is not found."""
        if not isinstance(self.run, str):
            return self.run
        return load_function(self.run, "agent") if _FUNCTION_SPEC.fullmatch(self.run) else None


@dataclass(frozen=True)
class SolveRequest:
    """The request to an agent: the data row, the address of the policy, and the seed of its random numbers."""

    row: Mapping[str, Any]
    base_url: str
    seed: str


class AgentRunner:
    """Runs an agent once."""

    def __init__(self, agent_spec: AgentSpec) -> None:
        self._agent_spec = agent_spec
        self._function = agent_spec.load_function()
        self._openai: Any = None
        if self._function:
            self._openai = import_extra("openai", "agents", f'run = "{agent_spec.run}"')
            # Before the fork: the import would take half a second in each process.
            import_extra("openai.resources", "agents", "an agent")
            _load_certificates()

    def run(self, request: SolveRequest) -> WorkerAnswer:
        """Return the reward that the agent gives its rollout, or the error."""
        seed_generators(request.seed)
        os.environ.update(OPENAI_BASE_URL=request.base_url, OPENAI_API_KEY=_PLACEHOLDER_API_KEY)
        for name in ("NO_PROXY", "no_proxy"):  # a proxy would not find this machine
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK_HOST)))
        reward, error = call_user_code(lambda: self._compute_reward(request))
        return WorkerAnswer(is_over=True, reward=reward, error="" if error is None else log_error(error))

    def _compute_reward(self, request: SolveRequest) -> float | None:
        spec = self._agent_spec
        value = self._call_function(request) if self._function else _run_command(str(spec.run), request.row)
        if value is None and not spec.has_rewards:
            raise InvalidResultError("the agent returned no reward, and the task defines none")
        return None if value is None else validate_number(value, "what the agent returned")

    def _call_function(self, request: SolveRequest) -> Any:
        assert self._function and self._openai
        is_async = inspect.iscoroutinefunction(self._function)
        http_kind = self._openai.DefaultAsyncHttpxClient if is_async else self._openai.DefaultHttpxClient
        client_kind = self._openai.AsyncOpenAI if is_async else self._openai.OpenAI
        client = client_kind(
            base_url=request.base_url,
            api_key=_PLACEHOLDER_API_KEY,
            max_retries=0,
            timeout=None,
            http_client=http_kind(verify=_load_certificates()),
        )
        result = self._function(dict(request.row), client)
        return asyncio.run(result) if is_async else result


@cache
def _load_certificates() -> Any:
    """Return the certificates that clients trust, read once before processes are forked, since that takes time."""
    return import_extra("httpx", "agents", "an agent").create_ssl_context()


def _run_command(command: str, row: Mapping[str, Any]) -> float | None:
    """Run a command with the row as JSON in its standard input. Return the number in the last line that it prints.

    Raises InvalidResultError if it cannot be run, or its exit status is not 0.
    """
    text = json.dumps(row, ensure_ascii=False, default=str)
    try:
        finished = subprocess.run(
            shlex.split(command), input=text, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        raise InvalidResultError(f"{command}: {error.strerror or error}") from error
    print(finished.stdout, end="", flush=True)
    if finished.returncode:
        raise InvalidResultError(f"{command}: exit status {finished.returncode}")
    try:
        return float(finished.stdout.split("\n")[-2 if finished.stdout.endswith("\n") else -1])
    except (ValueError, IndexError):
        return None


def serve_request(agent_spec: AgentSpec, connection: Connection) -> None:
    """Answer one request. The process ends when its parent closes the connection, whatever the agent does."""
    request: SolveRequest
    request, _ = receive_request(connection)
    parent_watch = threading.Thread(target=receive_request, args=(connection,), daemon=True)  # waits for the end
    parent_watch.start()
    send_answer(connection, encode_worker_answer(AgentRunner(agent_spec).run(request)))
    parent_watch.join()
