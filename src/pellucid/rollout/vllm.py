"""The sampler that generates with vLLM, and the vLLM engine of this process.

vLLM rounds differently from the scorer; importance weights correct the difference.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import WeakSet

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from pellucid.algorithm.batch import collate
from pellucid.models.linear import gather_full_tensor
from pellucid.policy.load import is_quantized
from pellucid.policy.logprobs import compute_token_logprobs
from pellucid.rollout.conversations import REPLY_POLL_SECONDS, ConversationBatch
from pellucid.rollout.groups import build_groups, check_prompt_lengths, compute_row_seed
from pellucid.rollout.nccl_transfer import RECEIVER_SETTINGS, TRANSFER_DEVICE, WeightReceiver
from pellucid.rollout.weight_check import WeightCheck, to_matrix
from pellucid.types import AsyncEnvironments, Completion, Group, Prompt, Sampling, UserError
from pellucid.utils.plugins import import_extra
from pellucid.utils.text import escape_controls, format_one_line

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy
    from pellucid.rollout.vllm_client import ServerPool

_CHECK_TEXT = (
    "On the 3rd of May, at half past seven, the old mill by the river began to turn again. Two boys had mended its"
    ' wheel: 17 boards, 42 nails, and a rope of 9 yards. "Will it hold?" asked the miller. Nobody knew; it held.\n'
)
"""A fixed text that both the engine and the scorer score at every push."""
TRUNCATION_ERROR = (
    'sampler.name = "{}" does not report which tokens top_k, top_p and min_p keep: set them to 0, 1 and 0, also in'
    ' [evaluate], or set sampler.name = "native"'
)


class EngineAnswer(NamedTuple):
    """A finished row."""

    key: Any
    tokens: list[int]
    """With the EOS token, if it ended with one."""
    logprobs: list[float]
    """In nats, at the sampling temperature."""


class Ranks(Protocol):
    """The processes of a run, as a sampler uses them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, items: Sequence[Any]) -> list[Any]: ...


class _SingleRank:
    rank, world_size = 0, 1

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


SINGLE_RANK = _SingleRank()


@dataclass
class VLLMSampler:
    """Samples with vLLM in this process, or on sampler servers."""

    rows: int = 256
    """The number of completions that are decoded at once."""
    cache_gb: float = 4.0
    """The size in GB of the KV cache of an engine in this process."""
    policy: Policy = None  # pyright: ignore[reportAssignmentType] - `sync` sets it
    version: int = 0
    environments: AsyncEnvironments | None = None
    """The environments that answer the policy, if rollouts are conversations."""
    deterministic: bool = False
    """Conversations only: all rows wait for all replies, so that the same seed gives the same bits."""
    adapter: Literal["merged", "request"] = "merged"
    """How an adapter is pushed: merged into its base, or by itself, if vLLM supports it."""
    engine: VLLMEngine | ServerPool | None = None
    """A pool of servers; without one, `sync` creates an engine in this process."""
    ranks: Ranks = SINGLE_RANK
    """The processes of the run. Each samples its own prompts, and all of them call `sync` together."""

    @property
    def batches_continuously(self) -> bool:
        """Whether prompts may be added at any time, as in `NativeSampler`."""
        return not self.environments

    def sync(self, policy: Policy, version: int = 0) -> None:
        """Push the weights of a policy. Raise UserError if the engine does not compute with them."""
        try:
            self._push(policy)
        except AdapterRefusedError as error:
            if isinstance(self.engine, VLLMEngine | None) and self.ranks.world_size > 1:  # no second engine can be made
                raise UserError(f'sampler.adapter = "request" does not work ({error}): set "merged"') from error
            self.adapter = "merged"
            if self.ranks.rank == 0:
                note = f'! sampler.adapter = "merged" is used instead of "request" ({error})'
                print(escape_controls(note), flush=True)
            self._push(policy)
        self.policy, self.version = policy, version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample a group for each prompt. Each row has its own random numbers. Truncation is not supported."""
        if sampling.truncates:
            raise UserError(TRUNCATION_ERROR.format("vllm"))
        assert self.engine
        try:
            with torch.random.fork_rng(devices=[]):  # vLLM seeds and draws the global random numbers
                if self.environments:
                    conversations = ConversationBatch(self.policy, self.version, self.environments, prompts, sampling)
                    return self._generate_conversations(self.engine, conversations)
                return self._generate_completions(self.engine, prompts, sampling)
        finally:
            self.engine.abort_all()

    def close(self) -> None:
        """End the threads of a pool, and delete its copy of the weights.

        An engine in this process stays open until the process exits, since vLLM then leaves the process group.
        """
        if self.engine and not isinstance(self.engine, VLLMEngine):
            self.engine.close()

    def _push(self, policy: Policy) -> None:
        shape = get_adapter_shape(policy) if policy.adapter and self.adapter == "request" else None
        if not self.engine or not self.engine.is_open:
            self.engine = VLLMEngine(policy, get_push_dtype(policy, shape), self.rows, self.cache_gb, shape)
        self.engine.sync(policy, shape)

    def _generate_completions(
        self, engine: VLLMEngine | ServerPool, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[Group]:
        contexts = [self.policy.encode(prompt) for prompt in prompts]
        check_prompt_lengths(contexts, engine.max_length - sampling.max_tokens)
        keys = [(p, g) for p in range(len(prompts)) for g in range(sampling.n)]
        for p, g in keys:
            seed = compute_row_seed(sampling.seed, prompts[p], g)
            engine.add_request((p, g), contexts[p], sampling.max_tokens, sampling.temperature, seed)
        answers: dict[tuple[int, int], EngineAnswer] = {}
        while engine.unfinished:
            answers |= {answer.key: answer for answer in engine.step()}
        _, tokens, logprobs = zip(*(answers[key] for key in keys), strict=True)
        return build_groups(self.policy, self.version, prompts, contexts, tokens, logprobs, [()] * len(keys))

    def _generate_conversations(self, engine: VLLMEngine | ServerPool, conversations: ConversationBatch) -> list[Group]:
        """Sample turns as replies come. The engine finds earlier turns in its prefix cache."""
        sampling = conversations.sampling
        while not conversations.is_done:
            conversations.start(2 * max(self.rows, sampling.n))
            conversations.poll_replies(0.0 if engine.unfinished else REPLY_POLL_SECONDS)
            while self.deterministic and conversations.pending_replies:
                conversations.poll_replies(REPLY_POLL_SECONDS)
            for row in conversations.take_ready_rows():
                (p, g), max_tokens = divmod(row.number, sampling.n), conversations.get_turn_limit(row)
                check_prompt_lengths([row.context], engine.max_length - max_tokens)
                seed = compute_row_seed(f"{sampling.seed}/{row.sampled_count}", conversations.prompts[p], g)
                engine.add_request((p, g), row.context, max_tokens, sampling.temperature, seed)
            for (p, g), tokens, logprobs in engine.step() if engine.unfinished else []:
                conversations.add_turn(conversations.rows[p * sampling.n + g], tokens, logprobs)
        return conversations.collect_groups()


# ---------------------------------------------------------------- what is pushed


def get_push_dtype(policy: Policy, adapter_shape: AdapterShape | None = None) -> torch.dtype:
    """Return the dtype in which weights are pushed and the engine computes.

    It is the policy's dtype, or fp32 if an adapter is merged into its base: bf16 and fp16 would round most of the
    adapter's update away, and the engine would sample from almost the base model.
    """
    return torch.float32 if policy.adapter and not adapter_shape else policy.dtype


def get_push_weights(policy: Policy, adapter_shape: AdapterShape | None = None) -> dict[str, Tensor]:
    """Return the weights to push, in the dtype of `get_push_dtype`, by their names in a checkpoint.

    With an adapter shape, they are copies of the adapter; without one, an adapter is merged into its base.
    """
    return dict(gather_push_weights(policy, adapter_shape))


@torch.no_grad()
def gather_push_weights(policy: Policy, adapter_shape: AdapterShape | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what `get_push_weights` returns, one weight at a time.

    If processes share the parameters, all of them iterate together, and each weight is gathered when it is its turn.
    """
    if adapter_shape:
        yield from copy_adapter_weights(policy).items()
    elif not policy.adapter:
        dtype = get_push_dtype(policy)
        for name, p in policy.weights().items():
            yield name, gather_full_tensor(_cast_shard(p, dtype)).detach().to(dtype)
    elif has_plain_adapter(policy.model):
        yield from _gather_merged_weights(policy)
    elif policy.sharded_modules:
        raise UserError(
            'sampler.name = "vllm" cannot merge this adapter while its base is sharded: set runtime.engine = "ddp", or'
            ' sampler.name = "native"'
        )
    else:
        merged = policy.build_merged_model(policy.masters())
        yield from ((name, p.detach()) for name, p in merged.named_parameters())


def _cast_shard(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a shard in the dtype in which the weight is pushed, so that less is sent; any other tensor as it is."""
    return p.to(dtype) if isinstance(p, DTensor) else p


def _gather_merged_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the base in fp32, each with its part of the adapter."""
    masters, weights = policy.masters(), policy.weights()
    for name, p in weights.items():
        if name in masters:
            continue
        weight = gather_full_tensor(p).detach().float()
        path, _, attribute = name.rpartition(".base_layer.")
        if path and attribute == "weight":
            a, b = (
                gather_full_tensor(masters[path + suffix + PEFT_SUFFIX]).detach().float().to(weight.device)
                for suffix in (LORA_A_SUFFIX, LORA_B_SUFFIX)
            )
            layer: Any = policy.model.get_submodule(path)
            update = (b @ a) * layer.scaling["default"]
            weight = weight + (update.T if layer.fan_in_fan_out else update)
        yield name.replace(".base_layer.", "."), weight


def get_text_length(max_length: int, block_size: int) -> int:
    """Return the length of the fixed text: just over two blocks of the KV cache, if the context is long enough."""
    return min(2 * block_size + 1, max_length - 1)


def encode_check_text(policy: Policy, length: int) -> list[int]:
    """Return the first `length` token ids of the fixed text, which is repeated if it is shorter."""
    ids = list(policy.tokenizer(_CHECK_TEXT)["input_ids"])
    return (ids * (1 + length // len(ids)))[:length]


@torch.no_grad()
def score_text(policy: Policy, ids: Sequence[int]) -> Tensor:
    """Return the scorer's log-probs of ids[1:], at temperature 1."""
    response = tuple(ids[1:])
    text = Completion(response, (0.0,) * len(response), "", False)
    batch = collate([Group(Prompt("", ""), tuple(ids[:1]), (text,))])
    hidden, head = policy.compute_hidden_states(batch)
    return compute_token_logprobs(hidden, head, batch.response_ids[0].to(hidden.device))[0]


# ---------------------------------------------------------------- the engine in this process
# The engine is created without weights, and every push loads some.
#
# On a CPU, vLLM packs the weights of linear layers and multiplies by them in a closure. Only the layer-wise reload
# replaces this closure, and it skips an LM head that is tied to the embedding. The engine is not compiled on a CPU,
# since compiled code would keep using replaced weights. vLLM's process groups serve only one engine, so a new engine
# closes the earlier one.

_QUIET_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""Environment variables that are set unless the user has set them."""
_VLLM_ERRORS = (ValueError, RuntimeError, NotImplementedError)
"""The exceptions that vLLM raises if it does not support something."""
_CPU_BLOCK_TOKENS = 32
"""The tokens in a block of the KV cache on a CPU: vLLM's default of 128 is longer than many prompts."""
_OPEN_ENGINES: WeakSet[VLLMEngine] = WeakSet()


def _shut_down_engine(owner: int, shutdown: Callable[[], None]) -> None:
    """Shut down an engine if this process is `owner`, not one of its forks."""
    if os.getpid() == owner:
        shutdown()


def check_vllm_installed() -> None:
    """Raise UserError if vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'sampler.name = "vllm" needs vllm: pip install "pellucid[vllm]" for a GPU, or without one "make vllm" and'
            " .venv-vllm/bin/pellucid",
            page="how-to/vllm",
        )


class _ModelSource(Protocol):
    """A policy, or a model of which only the configuration is known."""

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def save_config(self, folder: Path) -> None: ...


class VLLMEngine:
    """A vLLM engine in this process, with a model of the policy's architecture."""

    def __init__(
        self,
        policy: _ModelSource,
        dtype: torch.dtype,
        rows: int,
        cache_gb: float,
        adapter_shape: AdapterShape | None = None,
        receives: bool = False,
    ) -> None:
        """Create an engine without weights. An earlier engine of the process is closed.

        Args:
            dtype: the dtype of the weights that will be pushed, in which the engine computes.
            adapter_shape: the shape of the adapter, if it will be pushed without its base.
            receives: whether trainers in other processes may send weights over NCCL, if the engine is on a GPU.

        Raises:
            UserError: vLLM does not run this model.
            AdapterRefusedError: vLLM does not run it with such an adapter.
        """
        check_vllm_installed()
        for earlier in list(_OPEN_ENGINES):
            earlier.close()
        for name, value in _QUIET_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights need not leave the process
        self.dtype, self.device, self.eos_ids = dtype, policy.device, list(policy.eos_ids)
        receives = receives and not adapter_shape and self.device.type == TRANSFER_DEVICE
        with (
            warnings.catch_warnings(),
            tempfile.TemporaryDirectory() as folder,
            torch.random.fork_rng(devices=[]),
        ):
            warnings.simplefilter("ignore")
            self.vllm = import_extra("vllm", "vllm", "sampler.name")
            self.lora_request_class = importlib.import_module("vllm.lora.request").LoRARequest
            policy.save_config(Path(folder))
            try:
                settings = self._build_settings(rows, cache_gb, adapter_shape)
                settings |= RECEIVER_SETTINGS if receives else {}
                self.llm = self.vllm.LLM(model=folder, **settings)
            except _VLLM_ERRORS as error:
                if adapter_shape:
                    raise AdapterRefusedError(f"vLLM: {format_one_line(error)}") from error
                raise UserError(
                    f"policy.model: vLLM does not run this model ({format_one_line(error)}): set"
                    ' sampler.name = "native", or another sampler.cache_gb if memory is short'
                ) from error
        self.close = weakref.finalize(self, _shut_down_engine, os.getpid(), self.llm.llm_engine.engine_core.shutdown)
        atexit.register(self.close)  # before the run destroys its process group, which contains vLLM's groups
        _OPEN_ENGINES.add(self)
        config = self.llm.llm_engine.vllm_config
        self.max_length, self.block_size = config.model_config.max_model_len, config.cache_config.block_size
        models: list[Any] = []
        self.llm.apply_model(models.append)
        self.model = models[0]
        self.packed_layers = {
            part: (packed, parts)
            for packed, parts in getattr(self.model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        embedding = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        self.embeddings = [m for m in self.model.modules() if isinstance(m, embedding.VocabParallelEmbedding)]
        self.lm_heads = [m for m in self.embeddings if isinstance(m, embedding.ParallelLMHead)]
        self.shapes: dict[str, torch.Size] = {}
        self.weight_check = WeightCheck()
        self.unfinished: dict[str, Any] = {}
        """The keys of unfinished rows by request id."""
        self.request_numbers = itertools.count()
        self.adapter_numbers = itertools.count(1)
        self.adapter: Any = None
        """The LoRA request of the adapter that rows are sampled with."""
        self.receiver = WeightReceiver(self.llm, self.device) if receives else None
        """Receives weights over NCCL."""
        if adapter_shape:
            self._check_adapter(adapter_shape)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    def _build_settings(self, rows: int, cache_gb: float, adapter_shape: AdapterShape | None) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": int(cache_gb * 1e9),
            "max_num_seqs": rows,
            "max_model_len": -1,  # -1: as long as fits into the cache
            "disable_log_stats": True,
        }
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"  # one engine in each process of the run
        if adapter_shape:
            settings |= {"enable_lora": True, "max_lora_rank": adapter_shape.padded_rank, "max_loras": 1}
        if self.device.type != "cuda":
            return settings | {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
        free, total = torch.cuda.mem_get_info(self.device)
        return settings | {"gpu_memory_utilization": 0.9 * free / total}  # of the memory that the trainer leaves

    # ------------------------------------------------------------ weights

    def sync(self, policy: Policy, adapter_shape: AdapterShape | None) -> None:
        """Push the weights of a policy, or only its adapter if a shape is given, and check them."""
        ids = encode_check_text(policy, get_text_length(self.max_length, self.block_size))
        weights = get_push_weights(policy, adapter_shape)
        if adapter_shape and not self.weight_check.column_sums:
            weights = get_base_weights(policy) | weights
        with torch.random.fork_rng(devices=[]):
            self.score_tokens(ids)  # fills the prefix cache, which the push must clear
            self.push(weights)
            self.weight_check.check(self, weights, ids, score_text(policy, ids), policy.dtype)

    @torch.no_grad()
    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights by their names in the checkpoint, and clear the prefix cache.

        If all of them are adapter weights, the base stays.
        """
        self.shapes |= {name: weight.shape for name, weight in weights.items()}
        adapter = {name: weight for name, weight in weights.items() if is_adapter_weight(name)}
        if self.adapter:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
            self.adapter = None
        if base := {name: weight for name, weight in weights.items() if name not in adapter}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(base.items())})
            self.pack_tied_heads()
        if adapter:
            self.load_adapter(adapter)
        self.llm.reset_prefix_cache()

    @torch.no_grad()
    def receive(self, update_info: Mapping[str, Any]) -> None:
        """As `push`, for weights that a trainer sends over NCCL; `update_info` is that of `WeightReceiver.receive`."""
        assert self.receiver
        self.shapes |= dict(zip(update_info["names"], map(torch.Size, update_info["shapes"]), strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.receiver.receive(update_info)
        self.pack_tied_heads()
        self.llm.reset_prefix_cache()

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Load an adapter in place of the last one, under a new name, since vLLM keys its caches by name."""
        number = next(self.adapter_numbers)
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(adapter, Path(folder))
            self.adapter = self.lora_request_class(f"adapter {number}", number, folder)
            self.llm.llm_engine.add_lora(self.adapter)

    def _check_adapter(self, adapter_shape: AdapterShape) -> None:
        """Raise AdapterRefusedError if vLLM cannot load such an adapter, or if it cannot be read back."""
        zeros = adapter_shape.create_zeros(self.dtype)
        try:
            self.push(zeros)
            for name in zeros:
                self.read_columns(name, [0])
        except (UserError, *_VLLM_ERRORS) as error:
            self.close()
            raise AdapterRefusedError(format_one_line(error)) from error

    def pack_tied_heads(self) -> None:
        for head in self.lm_heads:
            if any(head.weight is table.weight for table in self.embeddings if table is not head):
                head.quant_method.process_weights_after_loading(head)

    @torch.no_grad()
    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """Return columns [n, len(indices)] of a weight, once for each layer that computes with it."""
        if is_adapter_weight(name):
            return [self._get_adapter_matrix(name)[:, list(indices)]]
        return [self._read_rows(module, name, rows, indices) for module, rows in self.locate_weight(name)]

    def locate_weight(self, name: str) -> list[tuple[Any, slice]]:
        """Return each module that computes with a weight, and the weight's rows in it. UserError if there is none."""
        path, _, attribute = name.rpartition(".")
        found, parts = self._find_layer(path)
        module = getattr(found, "base_layer", found)  # without the wrapper that adds an adapter
        if (weight := getattr(module, attribute, None)) is None:
            raise UserError(f'policy.model: vLLM has no {name}: set sampler.name = "native"')
        sizes = [self.shapes.get(f"{part}.{attribute}", torch.Size([0]))[0] for part in parts]
        start = sum(sizes[: parts.index(path)])
        rows = slice(start, start + self.shapes[name][0])
        tied = [head for head in self.lm_heads if head is not module and head.weight is weight]
        return [(each, rows) for each in (module, *tied)]

    def _find_layer(self, path: str) -> tuple[Any, list[str]]:
        """Return vLLM's layer for a path, and the paths of all layers that it packs. UserError if there is none."""
        parent, dot, leaf = path.rpartition(".")
        packed, parts = self.packed_layers.get(leaf, (leaf, [leaf]))
        try:
            return self.model.get_submodule(parent + dot + packed), [parent + dot + part for part in parts]
        except AttributeError as error:
            raise UserError(f'policy.model: vLLM has no {path}: set sampler.name = "native"') from error

    def _get_adapter_matrix(self, name: str) -> Tensor:
        """Return a matrix of the present adapter from the tensor that vLLM multiplies by."""
        path, _, matrix = name.rpartition(".")
        layer, parts = self._find_layer(path)
        stacks = getattr(layer, "lora_a_stacked" if matrix == LORA_A_SUFFIX[1:] else "lora_b_stacked", ())
        slots = self.model.lora_manager.lora_index_to_id
        if len(stacks) != len(parts) or not self.adapter or self.adapter.lora_int_id not in slots:
            raise UserError(f"vLLM has no adapter on {path}")
        n, k = self.shapes[name]
        return stacks[parts.index(path)][slots.index(self.adapter.lora_int_id), 0, :n, :k]

    def _read_rows(self, module: Any, name: str, rows: slice, indices: Sequence[int]) -> Tensor:
        """Return columns of a weight. If it may be packed, multiply it by columns of the identity."""
        attribute = name.rpartition(".")[2]
        multiplies = hasattr(module, "quant_method") and (module not in self.embeddings or module in self.lm_heads)
        if attribute != "weight" or not multiplies:
            return to_matrix(getattr(module, attribute)[rows])[:, list(indices)]
        one_hot = torch.zeros(len(indices), self.shapes[name][-1], dtype=self.dtype, device=self.device)
        one_hot[range(len(indices)), list(indices)] = 1.0
        return module.quant_method.apply(module, one_hot, None)[:, rows].T

    # ------------------------------------------------------------ tokens

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """Return the log-probs of ids[1:] at temperature 1, and how many of these tokens were in the prefix cache."""
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=False, detokenize=False
        )
        text = [{"prompt_token_ids": list(ids)}]
        [output] = self.llm.generate(text, sampling, use_tqdm=False, lora_request=self.adapter)
        found = [(of or {}).get(token) for of, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        return torch.tensor([float("nan") if x is None else x.logprob for x in found]), output.num_cached_tokens

    def add_request(self, key: Any, ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> None:
        """Queue a row: up to `max_tokens` tokens are sampled after `ids`."""
        sampling = self.vllm.SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            stop_token_ids=self.eos_ids,
            ignore_eos=True,  # stop only at `stop_token_ids`, not at the EOS tokens that vLLM finds
            detokenize=False,
        )
        number = str(next(self.request_numbers))
        self.unfinished[number] = key
        prompt = {"prompt_token_ids": list(ids)}
        self.llm.llm_engine.add_request(number, prompt, sampling, lora_request=self.adapter)

    def step(self) -> list[EngineAnswer]:
        """Sample a token for each running row. Return the rows that finished."""
        return [self._build_answer(output) for output in self.llm.llm_engine.step() if output.finished]

    def _build_answer(self, output: Any) -> EngineAnswer:
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        logprobs = [of[token].logprob for of, token in zip(answer.logprobs, tokens, strict=True)]
        return EngineAnswer(self.unfinished.pop(output.request_id), tokens, logprobs)

    def abort(self, keys: Collection[Any]) -> None:
        """Cancel the unfinished rows with these keys."""
        numbers = [number for number, key in self.unfinished.items() if key in keys]
        self.llm.llm_engine.abort_request(numbers)
        for number in numbers:
            del self.unfinished[number]

    def abort_all(self) -> None:
        """Cancel all unfinished rows."""
        self.abort(list(self.unfinished.values()))


# ---------------------------------------------------------------- adapters that are pushed by themselves
# Each layer has matrices A [rank, in] and B [out, rank]. B is multiplied by the scale of the adapter in fp32 and then
# rounded. vLLM gets a scale of 1, so it multiplies by exactly the values that were pushed.

LORA_A_SUFFIX, LORA_B_SUFFIX = ".lora_A", ".lora_B"
"""The names of the two matrices, after the path of a layer."""
PEFT_SUFFIX = ".default.weight"
"""The suffix that peft appends to these names."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; a smaller one is padded with zeros."""


class AdapterRefusedError(UserError):
    """vLLM cannot apply this adapter unless it is merged."""


class AdapterShape(NamedTuple):
    """The sizes of an adapter, which vLLM needs before weights are pushed."""

    rank: int
    layers: dict[str, tuple[int, int]]
    """The number of inputs and outputs of each layer with an adapter, by its path in the checkpoint."""

    @property
    def padded_rank(self) -> int:
        """The rank with which an engine is created."""
        return next(rank for rank in _VLLM_RANKS if rank >= self.rank)

    def create_zeros(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return an adapter of this shape that changes nothing."""
        first = {layer + LORA_A_SUFFIX: torch.zeros(self.rank, n, dtype=dtype) for layer, (n, _) in self.layers.items()}
        return first | {
            layer + LORA_B_SUFFIX: torch.zeros(m, self.rank, dtype=dtype) for layer, (_, m) in self.layers.items()
        }


def is_adapter_weight(name: str) -> bool:
    return name.endswith((LORA_A_SUFFIX, LORA_B_SUFFIX))


def get_full_shape(p: Any) -> torch.Size:
    """Return the shape of a parameter, of which stage 3 of DeepSpeed leaves no more than a shard."""
    return getattr(p, "ds_shape", p.shape)


def has_plain_adapter(model: nn.Module) -> bool:
    """Return whether all trained weights are matrices of plain LoRA."""
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    plain = {
        id(p)
        for layer in adapted
        if isinstance(layer.get_base_layer(), nn.Linear | Conv1D) and not layer.lora_variant
        for matrices in (layer.lora_A, layer.lora_B)
        for each in matrices.values()
        for p in (each.weight,)
    }
    return all(id(p) in plain for p in model.parameters() if p.requires_grad)


def get_adapter_shape(policy: Policy) -> AdapterShape:
    """Return the shape of a policy's adapter. Raise AdapterRefusedError if it is not plain LoRA on linear layers."""
    shapes = {name.removesuffix(PEFT_SUFFIX): get_full_shape(p) for name, p in policy.trainable().items()}
    for name, shape in shapes.items():
        layer, _, matrix = name.rpartition(".")
        if not is_adapter_weight(name):
            raise AdapterRefusedError(f"{name} is trained as well")
        module: Any = policy.model.get_submodule(layer)
        if type(module.get_base_layer()) is not nn.Linear or module.lora_variant:
            raise AdapterRefusedError(f"{layer} is not a plain linear layer with a plain adapter")
        if matrix == LORA_A_SUFFIX[1:] and shape[0] > _VLLM_RANKS[-1]:
            raise AdapterRefusedError(f"policy.lora is above {_VLLM_RANKS[-1]}")
    if any(is_quantized(p) for p in policy.model.parameters()):
        raise AdapterRefusedError("its base is in 4 bits")
    layers = [name.removesuffix(LORA_A_SUFFIX) for name in shapes if name.endswith(LORA_A_SUFFIX)]
    return AdapterShape(
        max(shapes[layer + LORA_A_SUFFIX][0] for layer in layers),
        {layer: (shapes[layer + LORA_A_SUFFIX][1], shapes[layer + LORA_B_SUFFIX][0]) for layer in layers},
    )


@torch.no_grad()
def copy_adapter_weights(policy: Policy) -> dict[str, Tensor]:
    """Return copies of an adapter's matrices in the compute dtype, with B multiplied by the scale.

    If processes share the parameters, all of them call this together.
    """
    found: dict[str, Tensor] = {}
    for name, p in policy.masters().items():
        path = name.removesuffix(PEFT_SUFFIX)
        layer: Any = policy.model.get_submodule(path.rpartition(".")[0])
        scale = layer.scaling["default"] if path.endswith(LORA_B_SUFFIX) else 1.0
        found[path] = (gather_full_tensor(p).detach().float() * scale).to(policy.device, policy.dtype)
    return found


def get_base_weights(policy: Policy) -> dict[str, Tensor]:
    """Return the frozen weights of the base by their names in a checkpoint, in the compute dtype."""
    return dict(gather_base_weights(policy))


@torch.no_grad()
def gather_base_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield what `get_base_weights` returns, one weight at a time, as `gather_push_weights` does."""
    trained = policy.trainable()
    for name, p in policy.weights().items():
        if name not in trained:
            yield name.replace(".base_layer.", "."), gather_full_tensor(p).detach().to(policy.dtype)


def write_adapter(adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Save an adapter in the format of peft, with a scale of 1."""
    rank = max(len(x) for name, x in adapter.items() if name.endswith(LORA_A_SUFFIX))
    settings = {"r": rank, "lora_alpha": rank, "bias": "none", "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{name}.weight": x.detach().cpu().contiguous() for name, x in adapter.items()}
    safetensors.torch.save_file(named, folder / "adapter_model.safetensors")
