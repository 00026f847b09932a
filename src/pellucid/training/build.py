"""Builds the objects that a Config describes: task, policy, reference, samplers, environments and runtime.

Before that, `check_settings` rejects combinations of settings with which these objects cannot work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pellucid.algorithm import grpo
from pellucid.algorithm.advantages import get_advantage_function
from pellucid.algorithm.objectives import get_objective_function
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, PolicyConfig
from pellucid.distributed.process_group import broadcast_decision, raise_in_all_processes
from pellucid.distributed.runtime import Runtime
from pellucid.environments.agents import AgentSpec
from pellucid.environments.pool import create_environments
from pellucid.policy import chat_template, load, policy
from pellucid.policy.chat_template import ChatTemplate
from pellucid.policy.policy import LORA_REFERENCE_ERROR, LoraReference, Policy
from pellucid.rewards.grading import GradedTask, load_graders
from pellucid.rewards.settings import RewardConfig
from pellucid.rollout.native import NativeSampler
from pellucid.rollout.select import choose_sampler
from pellucid.rollout.sglang import SERVER_CLIENTS
from pellucid.rollout.vllm import TRUNCATION_ERROR, VLLMSampler
from pellucid.rollout.vllm_client import ServerPool
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import get_innermost_task, is_process_bound, list_task_layers
from pellucid.training.evaluate import sample_held_out_prompts
from pellucid.training.memory import is_reference_cast
from pellucid.training.run_dir import is_first_process
from pellucid.types import (
    AsyncEnvironments,
    Evaluation,
    Progress,
    Prompt,
    Sampler,
    Sampling,
    Task,
    UserError,
    with_split,
)
from pellucid.utils import files, hardware
from pellucid.utils.plugins import import_extra
from pellucid.utils.text import print_notes

_MERGED_IN_FP32 = (
    'sampler.adapter = "merged": vLLM samples in float32, since {} would round most of the adapter\'s update away;'
    ' "request" passes the adapter separately'
)
MAX_REWARD_LOG_BYTES = 2**24
"""The size limit of rewards.log in bytes. It can be exceeded by the output of half a second."""
_IN_PROCESS_TASKS = (Arithmetic, Curriculum, Prefixed)
"""Tasks whose rewards cannot raise, hang or exit, so they are computed in the training process."""


@dataclass
class Components:
    """The objects built from a Config."""

    task: Task
    test_task: Task
    test_prompts: Sequence[Prompt]
    sampler: Sampler
    policy: Policy
    reference: Policy | LoraReference | None
    runtime: Runtime
    state: grpo.TrainingState
    environments: AsyncEnvironments | None = None
    """The environments of conversations; None for a task without them."""
    elapsed_seconds: float = 0.0
    """Seconds spent in finished steps, by the clock of this process."""
    evaluation_seconds: float = 0.0
    """Seconds that the last evaluation took; 0 before the first."""
    checkpoint_seconds: float = 0.0
    """Seconds that the last checkpoint took; 0 before the first."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """The evaluations so far, by step."""
    failures: list[str] = field(default_factory=list)
    """The first error of each of the last steps in which every reward failed."""
    reward_log: files.BoundedLog | None = None
    """Limits the size of rewards.log, which rewards and environments write."""

    def close(self) -> None:
        """End the worker processes of rewards and environments, and the threads of a sampler with servers."""
        if isinstance(self.sampler, VLLMSampler):
            self.sampler.close()
        if self.environments:
            self.environments.close()
        if isinstance(self.task, GradedTask):
            self.task.close()
        if self.reward_log:
            self.reward_log.close()


def resolve_machine_settings(cfg: Config) -> Config:
    """Return the settings with the dtype of this machine and the commit of the model.

    A resumed run reads both from config.json and does not choose them again.
    """
    p, device, timeout = cfg.policy, hardware.pick_device(cfg.policy.device), cfg.runtime.timeout

    def find_commit() -> str:
        with suppress(UserError):  # loading the model raises a more detailed error
            return load.resolve_commit(p.model, p.access) or p.revision
        return p.revision

    dtype = broadcast_decision(lambda: str(hardware.pick_dtype(p.dtype, device)), device, timeout)
    revision = broadcast_decision(find_commit, device, timeout)
    return replace(cfg, policy=replace(p, dtype=dtype.removeprefix("torch."), revision=revision))


def convert_gguf_model(cfg: Config) -> None:
    """Let the main process convert a policy in GGUF, whole, unless that has been done; the other processes wait."""
    p = cfg.policy

    def convert() -> str:
        # Loading the model raises an error of this again, in all processes.
        with suppress(UserError), load.explain_policy_errors(p.model):
            if load.is_conversion_due(p.model):
                if os.environ.get("WORLD_SIZE", "1") != "1":
                    print_notes(f"{p.model} is converted to safetensors, once and whole; other processes wait")
                load.locate_model(p.model)
        return ""

    broadcast_decision(convert, hardware.pick_device(p.device), cfg.runtime.timeout)


def build_components(cfg: Config, log: Path | None = None) -> Components:
    """Build the objects of settings that `check_settings` accepts.

    The output of rewards and environments goes to `log`. Raise UserError if the task, the model or the runtime does not
    work with the settings.
    """
    device = hardware.pick_device(cfg.policy.device)
    algorithm, dtype = cfg.algorithm, hardware.pick_dtype(cfg.policy.dtype, device)
    # The task comes first, so its errors are found before a model is loaded.
    task = isolate_task_rewards(with_split(cfg.task, "train"), cfg.reward, log)
    learner = raise_in_all_processes(
        lambda: policy.load_policy(
            cfg.policy.model,
            device,
            dtype,
            cfg.sampler.temperature,
            entropy_grad=algorithm.entropy_coef > 0,
            gradient_checkpointing=cfg.policy.gradient_checkpointing,
            lora_rank=cfg.policy.lora,
            lora_alpha=cfg.policy.lora_alpha,
            lora_targets=cfg.policy.lora_targets,
            template=make_template(cfg.policy),
            access=cfg.policy.access,
            load_in_4bit=cfg.policy.load_in_4bit,
            engine=cfg.policy.engine,
            offload_masters=cfg.optimizer.offload and cfg.runtime.engine in ("auto", "ddp"),
            leave_weights_in_files=cfg.runtime.shards_weights,
        )
    )
    if is_first_process() and (reason := learner.stored_weights.reason):
        print_notes(f"{cfg.policy.model} is loaded whole in each process before it is sharded: {reason}")
    environments = make_environments(cfg, learner, log)
    # The sampler is chosen before the engine shards the policy, since this tests the policy's decoder.
    sampler = pick_sampler(cfg, learner, environments)
    total_updates = algorithm.steps * algorithm.inner_steps
    runtime = Runtime(learner, cfg.optimizer, total_updates, cfg.runtime)
    if isinstance(sampler, VLLMSampler):
        sampler.ranks = runtime
        if isinstance(sampler.engine, ServerPool):
            sampler.engine.ranks = runtime
    _check_step_size(algorithm, runtime.world_size)
    # The reference is loaded after the policy is sharded, so that two unsharded models never exist at the same time.
    reference = _load_reference(cfg, learner) if algorithm.kl_coef else None
    if reference is not None and algorithm.kl == "exact":
        learner.set_kl_reference(reference)
    if isinstance(reference, Policy):
        runtime.engine.shard_reference(reference)
    test_task = with_split(task, "test")
    return Components(
        task=task,
        test_task=test_task,
        test_prompts=(
            sample_held_out_prompts(with_split(cfg.task, "test"), cfg.evaluate.n) if cfg.evaluate.every else []
        ),
        sampler=sampler,
        policy=learner,
        reference=reference,
        runtime=runtime,
        state=grpo.TrainingState(kl_coef=algorithm.kl_coef),
        environments=environments,
        reward_log=files.BoundedLog(log, MAX_REWARD_LOG_BYTES) if log and is_first_process() else None,
    )


def make_progress(cfg: GRPOConfig, step: int) -> Progress:
    """Return the progress of a run after `step` steps."""
    return Progress(step, cfg.steps, cfg.prompts_per_step)


def make_template(cfg: PolicyConfig) -> ChatTemplate:
    return ChatTemplate(cfg.template, cfg.template_kwargs)


def check_settings(cfg: Config) -> None:
    """Raise UserError for settings that contradict each other or that this machine does not support.

    A run and its dry run call this before they load a model.
    """
    p, engine = cfg.policy, cfg.runtime.engine
    device = hardware.pick_device(p.device)
    dtype = hardware.pick_dtype(p.dtype, device)
    is_sharded, offload = engine in ("fsdp2", "deepspeed"), cfg.optimizer.offload
    get_advantage_function(cfg.algorithm.advantage)  # these load user-defined functions from their files
    get_objective_function(cfg.algorithm.objective)
    _refuse_conflicts(
        {
            'policy.dtype = "float16" needs runtime.engine = "ddp": choose another dtype, or that engine': (
                is_sharded and dtype == torch.float16
            ),
            'algorithm.reference_every does not work with runtime.engine = "deepspeed": use "fsdp2", or set 0': (
                engine == "deepspeed" and cfg.algorithm.reference_every > 0
            ),
            f'policy.load_in_4bit: runtime.engine = "{engine}" cannot shard 4-bit weights: use "ddp"': (
                is_sharded and p.load_in_4bit
            ),
            "policy.load_in_4bit: optimizer.offload gains nothing, since an adapter is small: leave it out": (
                offload and p.load_in_4bit
            ),
            'optimizer.offload keeps gradients in policy.dtype, and those of "float16" cannot be unscaled: set'
            ' policy.dtype = "bfloat16" or policy.lora, or leave optimizer.offload out': (
                dtype == torch.float16 and offload and not p.lora
            ),
        }
    )
    if dtype == torch.float16:
        hardware.check_float16(device)
    check_sampler(cfg)
    if cfg.algorithm.kl_coef and p.lora and cfg.algorithm.reference_every:
        raise UserError(LORA_REFERENCE_ERROR)
    _check_step_size(cfg.algorithm, int(os.environ.get("WORLD_SIZE", "1")))


def check_sampler(cfg: Config) -> None:
    """Raise UserError for settings that the sampler does not support."""
    s, by_engine, name = cfg.sampler, cfg.sampler.uses_engine, f'sampler.name = "{cfg.sampler.name}"'
    is_sharded = cfg.runtime.engine in ("fsdp2", "deepspeed")
    truncations = {(section.top_k, section.top_p, section.min_p) for section in (s, cfg.evaluate)}
    _refuse_conflicts(
        {
            f'{name} in the training processes needs runtime.engine = "ddp", not "{cfg.runtime.engine}": name servers'
            " in sampler.urls, which work with every engine": s.name == "vllm" and is_sharded and not s.urls,
            f'{name} does not support a 4-bit base: set "native", or leave out policy.load_in_4bit': (
                by_engine and cfg.policy.load_in_4bit
            ),
            'sampler.adapter = "request" needs a LoRA adapter: give policy.lora, its rank, or leave "request" out': (
                by_engine and s.adapter == "request" and not cfg.policy.lora
            ),
            TRUNCATION_ERROR.format(s.name): by_engine and truncations != {(0, 1.0, 0.0)},
            'sampler.ahead = 1 needs a sampler with weights of its own: set sampler.name = "vllm"': (
                s.ahead > 0 and not by_engine
            ),
            'sampler.ahead = 1 trains on tokens of a policy one step old: set algorithm.correction, such as "token"': (
                s.ahead > 0 and cfg.algorithm.correction == "none"
            ),
        }
    )


def _refuse_conflicts(conflicts: Mapping[str, bool]) -> None:
    """Raise UserError with the first message that applies."""
    for message, applies in conflicts.items():
        if applies:
            raise UserError(message)


def _check_step_size(cfg: GRPOConfig, world_size: int) -> None:
    unit = world_size * cfg.minibatches
    if cfg.prompts_per_step % unit:
        raise UserError(
            f"algorithm.prompts_per_step = {cfg.prompts_per_step} must be a multiple of processes * minibatches ="
            f" {unit}: groups are not split"
        )


def isolate_task_rewards(task: Task, cfg: RewardConfig, log: Path | None = None) -> Task:
    """Return the task with its rewards computed in worker processes, unless they cannot raise, hang or exit.

    The output of rewards goes to `log`. A judge keeps its answers in a folder beside it.
    """
    if all(type(layer) in _IN_PROCESS_TASKS for layer in list_task_layers(task)):
        return task
    judge_cache = log.with_name("judge") if log else None
    return GradedTask(task, cfg, log, load_graders(task, judge_cache), in_process=is_process_bound(task))


def _load_reference(cfg: Config, learner: Policy) -> Policy | LoraReference:
    if cfg.policy.lora:
        return LoraReference(learner)
    device = learner.device if cfg.policy.reference == "auto" else hardware.pick_device(cfg.policy.reference)
    return raise_in_all_processes(
        lambda: policy.load_frozen_policy(
            cfg.policy.model,
            device,
            learner.dtype,
            cfg.sampler.temperature,
            cfg.policy.engine,
            access=cfg.policy.access,
            keep_fp32=not is_reference_cast(cfg),
            leave_weights_in_files=cfg.runtime.shards_weights and device == learner.device,
        )
    )


def make_environments(cfg: Config, learner: Policy, log: Path | None = None) -> AsyncEnvironments | None:
    """Start the environments of a task with conversations; None for any other task.

    Print a warning if the chat template of the policy cannot represent conversations.
    """
    task = get_innermost_task(cfg.task)
    if isinstance(spec := getattr(task, "environment_spec", None), AgentSpec):
        for library in ("fastapi", "uvicorn"):
            import_extra(library, "agents", "an agent")
        from pellucid.serve.agent_endpoint import AgentPool  # noqa: PLC0415 - it imports the libraries checked above

        environments = AgentPool(spec, learner, cfg.reward, log, task.seed)
    else:
        environments = create_environments(task, cfg.reward, log, in_process=is_process_bound(task))
    note = chat_template.check_bridge(learner.tokenizer, learner.eos_ids) if environments else ""
    if is_first_process():
        print_notes(note)
    return environments


def pick_sampler(cfg: Config, learner: Policy, environments: AsyncEnvironments | None) -> Sampler:
    """Return the sampler that the settings name. If it cannot sample this model, return another, and print a note."""
    s, note = cfg.sampler, ""
    if s.uses_engine:
        pool = ServerPool(s.urls, s.timeout, bool(s.ahead), SERVER_CLIENTS[s.name]) if s.urls else None
        sampler = VLLMSampler(s.rows, s.cache_gb, environments=environments, adapter=s.adapter, engine=pool)
        if s.adapter == "merged" and learner.adapter and learner.dtype != torch.float32:
            note = _MERGED_IN_FP32.format(str(learner.dtype).removeprefix("torch."))
    else:
        sampler, note = choose_sampler(s.name, s.rows, learner, environments)
    if isinstance(sampler, NativeSampler | VLLMSampler):
        sampler.deterministic = cfg.policy.deterministic
    if is_first_process():
        print_notes(note)
    return sampler


def make_training_sampling(cfg: Config) -> Sampling:
    """Return the sampling settings for the completions that are trained on."""
    s = cfg.sampler
    return Sampling(
        cfg.algorithm.group_size,
        s.temperature,
        s.max_tokens,
        s.top_k,
        s.top_p,
        s.min_p,
        turns=s.turns,
        turn_tokens=s.turn_tokens,
    )


def make_evaluation_sampling(cfg: Config) -> Sampling:
    """Return the sampling settings for an evaluation."""
    e = cfg.evaluate
    return replace(make_training_sampling(cfg), n=e.samples or e.k, top_k=e.top_k, top_p=e.top_p, min_p=e.min_p)
