"""The sections of a recipe that describe a run, not its algorithm: policy, sampler, evaluation, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from pellucid.policy.access import USUAL, Access


@dataclass(frozen=True)
class PolicyConfig:
    """`[policy]`: the model that is trained, and how it computes."""

    model: str = "smollm2-135m"
    """A local folder, a .gguf file, a Hub id, modelscope:OWNER/NAME, or smollm2-135m (embedded in a wheel)."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub or of ModelScope; empty is its default branch. A run records which
    commit of the Hub it was."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the model's own folder, as you, with all that you may do: read it before."""
    template: str = ""
    """A file with a chat template in Jinja, instead of the checkpoint's; it is saved with the model."""
    template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Values of variables of the chat template, such as enable_thinking; they are saved with the model, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of computing; master weights are fp32. auto: bfloat16 where this machine is faster in it, else float32.
    float16, for GPUs without bfloat16, trains with loss scaling; some models are too large for its range."""
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the weights in the saved model. The others take half the disk, and round: a merged LoRA update is
    mostly smaller than what bfloat16 rounds away."""
    device: str = "auto"
    deterministic: bool = False
    """On a GPU: the same run has the same bits, more slowly. A CPU repeats itself anyway."""
    lora: int = 0
    """Rank of a LoRA adapter to train instead of the whole model; 0 trains the whole model."""
    lora_alpha: float = 0.0
    """The adapter is weighed by lora_alpha / lora; 0 is twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that have an adapter, such as q_proj v_proj; none are all of them."""
    load_in_4bit: bool = False
    """Keep the frozen base of an adapter in 4-bit numbers, NF4 by bitsandbytes, without runtime.engine or offload."""
    reference: str = "auto"
    """Device of the frozen reference (auto: that of the policy); it is loaded only where kl_coef > 0."""
    engine: Literal["auto", "compiled", "transformers"] = "auto"
    """auto: our own decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3), transformers for all others. compiled:
    its update by torch.compile, for long runs; needs a C++ compiler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory where answers are long, and more time. `pellucid doctor
    --plan RECIPE` says what it saves for a run."""

    def __post_init__(self) -> None:
        for name in ("lora", "lora_alpha"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not self.lora and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets are of an adapter: give lora, its rank, too")
        if self.load_in_4bit and not self.lora:
            raise ValueError("load_in_4bit is for the frozen base of an adapter: give lora, its rank, too")

    @property
    def access(self) -> Access:
        """How the files of the model may be read."""
        return Access(self.revision, self.trust_remote_code)

    def get_access(self, name: str) -> Access:
        """The same where `name` is the model; another has not been trusted."""
        return self.access if name == self.model else USUAL


def refuse_truncation(top_k: int, top_p: float, min_p: float) -> None:
    """Raise ValueError for values out of range."""
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} must not be negative")
    if not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_p = {top_p} must be in (0, 1] and min_p = {min_p} in [0, 1]")


def refuse_address(url: str) -> None:
    """Raise ValueError for what is no address of a server."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        parts, whole = None, False
    if parts is None or not whole or parts.query or parts.username or parts.password:
        said = "" if "@" in url else f" {url!r}"  # with "@" it may hold a password
        raise ValueError(f"urls:{said} is no address: write http://HOST:PORT, and a secret into PELLUCID_SAMPLER_TOKEN")


@dataclass(frozen=True)
class SamplerConfig:
    """`[sampler]`: how completions are drawn."""

    name: Literal["native", "hf", "vllm"] = "native"
    """native: our decoder. hf: transformers, slow. vllm: vLLM in this process or, with urls, on other machines, in an
    arithmetic of its own, for which algorithm.correction is "token" where nothing else is stated."""
    temperature: float = 1.0
    """Temperature of sampling and of the log-probs that are trained on. Evaluation adds greedy answers."""
    max_tokens: int = 64
    """Longest completion, in tokens; of a conversation all that follows the question, whoever said it."""
    turns: int = 8
    """How many times the policy may speak in a conversation."""
    turn_tokens: int = 0
    """The most tokens that it samples at a time there; 0 is as many as max_tokens leaves."""
    dtype: Literal["auto", "int8"] = "auto"
    """auto: completions are drawn in policy.dtype. int8: those that are trained on, by the native sampler on a CPU, in
    products of 8 bits within the layers, for which algorithm.correction is "token" where nothing else is stated."""
    rows: int = 256
    """Completions that the native sampler decodes at once; as some finish, the next prompts take their place."""
    top_k: int = 0
    """Draw from the k likeliest tokens only, and train on the policy so truncated (sampling masks); 0 is off."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, and train on that; 1 is off."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest, and train on that; 0 is off."""
    ahead: Literal[0, 1] = 0
    """With 1 and vllm, the next step is drawn while this one is trained, from weights one step old."""
    cache_gb: float = 4.0
    """Memory of the keys and values of vLLM, in GB."""
    adapter: Literal["merged", "request"] = "merged"
    """How vLLM is given a LoRA adapter: merged into its base, as whole weights; request: the base once and then the
    adapter alone, which it adds to each product. Where it does not take one so, it is merged."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that sample by vLLM in place of this process; `pellucid sampler` starts one, with its own
    rows and cache_gb. Example: http://gpu2:8001"""
    timeout: float = 120.0
    """Seconds without an answer after which a server hangs, and its rows go to the others."""

    def __post_init__(self) -> None:
        if not self.cache_gb > 0:
            raise ValueError(f"cache_gb = {self.cache_gb} must be positive")
        for url in self.urls:
            refuse_address(url)
        if self.urls and self.name != "vllm":
            raise ValueError(f'urls are for name = "vllm", not "{self.name}"')
        if self.adapter != "merged" and self.name != "vllm":
            raise ValueError(f'adapter = "{self.adapter}" is for name = "vllm", not "{self.name}"')
        if self.dtype != "auto" and self.name != "native":
            raise ValueError(f'dtype = "{self.dtype}" is for name = "native", not "{self.name}"')
        if not self.timeout > 0:
            raise ValueError(f"timeout = {self.timeout} must be positive")
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature} must be positive: greedy groups have no contrast")
        for name, least in (("max_tokens", 1), ("rows", 1), ("turns", 1), ("turn_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        refuse_truncation(self.top_k, self.top_p, self.min_p)

    @property
    def inexact_setting(self) -> str:
        """The setting by which completions are drawn in another arithmetic than the update's; empty where none is."""
        if self.dtype != "auto":
            return f'sampler.dtype = "{self.dtype}"'
        return 'sampler.name = "vllm"' if self.name == "vllm" else ""


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: how often and on how many held-out prompts the policy is evaluated."""

    every: int = 10
    """Steps between evaluations, besides those before and after training; 0 is none at all."""
    n: int = 100
    """How many held-out prompts are asked."""
    k: int = 8
    """The k of mean@k and pass@k; 0 asks for greedy answers only."""
    samples: int = 0
    """How many samples of each prompt mean@k and pass@k are estimated from; 0 means k."""
    top_k: int = 0
    """Draw samples from the k likeliest tokens only; 0 is off. Greedy answers do not change."""
    top_p: float = 1.0
    """Draw samples from the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Draw samples from tokens at least this many times as likely as the likeliest; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("every", "k", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.n < 1:
            raise ValueError(f"n = {self.n} must be at least 1")
        refuse_truncation(self.top_k, self.top_p, self.min_p)
        if 0 < self.samples < self.k:
            raise ValueError(f"samples = {self.samples} must be at least k = {self.k}, or 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: which states of the run are kept."""

    every: int = 10
    """Steps between checkpoints, besides the one behind the last step; 0 is none, except where Ctrl-C asks for one."""
    keep_last: int = 2
    """Checkpoints that are kept: where something damages the newest, --resume takes the one before."""
    keep_finished: Literal["newest", "all", "none"] = "newest"
    """Which of them are left when the run is finished and its model saved. The newest, with the optimizer's state, is
    what --resume with more steps goes on from; none leaves the model alone."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep_last < 1:
            raise ValueError("every must not be negative and keep_last at least 1")


@dataclass(frozen=True)
class LogConfig:
    """`[log]`: what is written besides metrics.jsonl and evals.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases; offline writes into the run folder, for `wandb sync` later."""
    project: str = "pellucid"
    """The project at Weights & Biases."""
    rollouts: int = 1
    """Steps between those whose completions go into rollouts.jsonl, besides step 1; 0 is none at all."""
    tokens: int = 0
    """Groups of each step of which tokens/ says, token by token, what the update did: those that taught something
    first. It costs a forward pass of their completions; 0 costs nothing."""
    token_steps: int = 1
    """Steps between those whose tokens are recorded, besides step 1."""
    predictions: int = 10
    """Steps between those whose tokens' movement is also predicted to first order, where they are recorded, besides
    step 1: several times the cost of the record, and a copy of the weights. 0 is none at all."""
    traces: Literal["extremes", "by_length"] = "extremes"
    """Which completions report.html shows of the first and the last step: the best and the worst of all, or of the
    short, the middling and the long each."""

    def __post_init__(self) -> None:
        if self.token_steps < 1:
            raise ValueError(f"token_steps = {self.token_steps} must be at least 1: tokens = 0 records none")
        for name in ("rollouts", "tokens", "predictions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
