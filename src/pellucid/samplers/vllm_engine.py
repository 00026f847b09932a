"""vLLM's engine in this process: made without weights, which every push brings, and read back as it computes.

On a CPU the weights of linear layers are packed, and what multiplies by them is a closure that only the layer-wise
reload makes anew; it leaves out a head that is tied to the embedding. The engine is not compiled there: compiled code
would hold on to packed weights that are gone. What a process has of vLLM's groups is one engine's: a new one ends it.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from pellucid.machine.extras import extra
from pellucid.samplers.adapters import A, Form, RefusedError, is_of_adapter, write
from pellucid.types import UserError

if TYPE_CHECKING:
    from pellucid.policy.policy import Policy

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""Unless it is said otherwise."""
FAULTS = (ValueError, RuntimeError, NotImplementedError)
"""What vLLM raises where it does not do what it is asked for."""
BLOCK = 32
"""Tokens that are cached together on a CPU: its usual 128 are more than many a prompt has."""


def shut_down(owner: int, shutdown: Callable[[], None]) -> None:
    """Shut the engine of the process `owner` down; a fork of it leaves it running."""
    if os.getpid() == owner:
        shutdown()


def check_library() -> None:
    """UserError where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'sampler.name = "vllm" needs vllm: pip install "pellucid[vllm]" for a GPU, or without one "make vllm" and'
            " .venv-vllm/bin/pellucid"
        )


class Place(NamedTuple):
    """Where a weight is computed with: rows of an attribute of a module."""

    module: Any
    attribute: str
    rows: slice


class Said(NamedTuple):
    """What the engine has sampled."""

    key: Any
    tokens: list[int]
    """With the end-of-sequence token, where it ended with one."""
    logprobs: list[float]
    """In nats, at the temperature."""


ENGINES: WeakSet[Engine] = WeakSet()


class Engine:
    """A model of this policy's kind. `ask`, then `step` until nothing is `asked`. It ends the engine before it."""

    def __init__(
        self, policy: Any, dtype: torch.dtype, rows: int, cache_gb: float, adapter_shape: Form | None = None
    ) -> None:
        """dtype: of the weights that will be pushed, in which the engine computes. rows: how many completions are
        decoded at once. cache_gb: memory of keys and values. form: of an adapter that is pushed by itself.

        UserError where vLLM does not run this model, RefusedError where it does not so with such an adapter.
        """
        check_library()
        for earlier in list(ENGINES):
            earlier.close()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights need not leave the process
        self.dtype, self.device, self.eos_ids = dtype, policy.device, list(policy.eos_ids)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, fixed_chance():
            warnings.simplefilter("ignore")
            self.vllm = extra("vllm", "vllm", "sampler.name")
            self.lora_request_class = importlib.import_module("vllm.lora.request").LoRARequest
            policy.save_config(Path(folder))
            try:
                self.llm = self.vllm.LLM(model=folder, **self._build_settings(rows, cache_gb, adapter_shape))
            except FAULTS as error:
                if adapter_shape:
                    raise RefusedError(f"vLLM: {in_a_line(error)}") from error
                raise UserError(
                    f"policy.model: vLLM does not run this model ({in_a_line(error)}): set"
                    ' sampler.name = "native", or sampler.cache_gb where it lacks memory'
                ) from error
        self.close = weakref.finalize(self, shut_down, os.getpid(), self.llm.llm_engine.engine_core.shutdown)
        atexit.register(self.close)  # before the process group of the run is left, which vLLM's groups are parts of
        ENGINES.add(self)
        config = self.llm.llm_engine.vllm_config
        self.max_length, self.block_size = config.model_config.max_model_len, config.cache_config.block_size
        models: list[Any] = []
        self.llm.apply_model(models.append)
        self.model = models[0]
        self.packed_layers = {
            part: (whole, parts)
            for whole, parts in getattr(self.model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        embedding = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
        self.embeddings = [m for m in self.model.modules() if isinstance(m, embedding.VocabParallelEmbedding)]
        self.lm_heads = [m for m in self.embeddings if isinstance(m, embedding.ParallelLMHead)]
        self.shapes: dict[str, torch.Size] = {}
        self.unfinished: dict[str, Any] = {}
        """The keys of requests by their ids."""
        self.request_numbers = itertools.count()
        self.adapter_numbers = itertools.count(1)
        self.adapter: Any = None
        """The adapter that rows are sampled with, as vLLM is asked for it."""
        if adapter_shape:
            self._check_adapter(adapter_shape)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    def _build_settings(self, rows: int, cache_gb: float, adapter_shape: Form | None) -> dict[str, Any]:
        where: dict[str, Any] = {"enforce_eager": True, "block_size": BLOCK}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            where = {"gpu_memory_utilization": 0.9 * free / total}  # of what the trainer leaves
        with_one = (
            {"enable_lora": True, "max_lora_rank": adapter_shape.padded_rank, "max_loras": 1} if adapter_shape else {}
        )
        return {
            **where,
            **with_one,
            "dtype": str(self.dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": int(cache_gb * 1e9),
            "max_num_seqs": rows,
            "max_model_len": -1,  # as long as the cache holds
            "disable_log_stats": True,
        }

    # ------------------------------------------------------------ weights

    @torch.no_grad()
    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by their names in the checkpoint, and forget what was computed with others.

        Those of an adapter may come alone: then the others stay.
        """
        self.shapes |= {name: weight.shape for name, weight in weights.items()}
        adapter = {name: weight for name, weight in weights.items() if is_of_adapter(name)}
        if self.adapter:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
            self.adapter = None
        if whole := {name: weight for name, weight in weights.items() if name not in adapter}:
            self.reload_weights(whole)
        if adapter:
            self.load_adapter(adapter)
        self.llm.reset_prefix_cache()

    def reload_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.pack_tied_heads()

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Take this adapter for the one before. vLLM keys what it caches by its name, so each has one of its own."""
        number = next(self.adapter_numbers)
        with tempfile.TemporaryDirectory() as folder:
            write(adapter, Path(folder))
            self.adapter = self.lora_request_class(f"adapter {number}", number, folder)
            self.llm.llm_engine.add_lora(self.adapter)

    def _check_adapter(self, adapter_shape: Form) -> None:
        """RefusedError where vLLM does not compute with such an adapter, or not where it can be read back."""
        zeros = adapter_shape.create_zeros(self.dtype)
        try:
            self.push(zeros)
            for name in zeros:
                self.read_columns(name, [0])
        except (UserError, *FAULTS) as error:
            self.close()
            raise RefusedError(in_a_line(error)) from error

    def pack_tied_heads(self) -> None:
        for head in self.lm_heads:
            if any(head.weight is table.weight for table in self.embeddings if table is not head):
                head.quant_method.process_weights_after_loading(head)

    @torch.no_grad()
    def read_columns(self, name: str, indices: Sequence[int]) -> list[Tensor]:
        """Columns [n, len(at)] of a weight, as each place that computes with it has them."""
        if is_of_adapter(name):
            return [self._get_adapter_matrix(name)[:, list(indices)]]
        return [self._read_location(place, indices, self.shapes[name][-1]) for place in self.locate_weight(name)]

    def locate_weight(self, name: str) -> list[Place]:
        """Where the weight of this name is computed with. UserError where the model has none of that name."""
        path, _, attribute = name.rpartition(".")
        found, parts = self._find_layer(path)
        module = getattr(found, "base_layer", found)  # the layer itself, where it stands in one that adds an adapter
        if (weight := getattr(module, attribute, None)) is None:
            raise UserError(f'policy.model: vLLM has no {name}: set sampler.name = "native"')
        sizes = [self.shapes.get(f"{part}.{attribute}", torch.Size([0]))[0] for part in parts]
        start = sum(sizes[: parts.index(path)])
        rows = slice(start, start + self.shapes[name][0])
        tied = [Place(head, attribute, rows) for head in self.lm_heads if head is not module and head.weight is weight]
        return [Place(module, attribute, rows), *tied]

    def _find_layer(self, path: str) -> tuple[Any, list[str]]:
        """A layer, and the paths of all that are joined in it, this one among them. UserError where there is none."""
        parent, dot, leaf = path.rpartition(".")
        whole, parts = self.packed_layers.get(leaf, (leaf, [leaf]))
        try:
            return self.model.get_submodule(parent + dot + whole), [parent + dot + part for part in parts]
        except AttributeError as error:
            raise UserError(f'policy.model: vLLM has no {path}: set sampler.name = "native"') from error

    def _get_adapter_matrix(self, name: str) -> Tensor:
        """A matrix of the adapter, where vLLM multiplies by it what it computes for the present one."""
        path, _, matrix = name.rpartition(".")
        layer, parts = self._find_layer(path)
        stacks = getattr(layer, "lora_a_stacked" if matrix == A[1:] else "lora_b_stacked", ())
        slots = self.model.lora_manager.lora_index_to_id
        if len(stacks) != len(parts) or not self.adapter or self.adapter.lora_int_id not in slots:
            raise UserError(f"vLLM has no adapter on {path}")
        n, k = self.shapes[name]
        return stacks[parts.index(path)][slots.index(self.adapter.lora_int_id), 0, :n, :k]

    def _read_location(self, location: Place, indices: Sequence[int], width: int) -> Tensor:
        """By a product with columns of the identity, where there is a product: what it computes with may be packed."""
        module = location.module
        multiplies = hasattr(module, "quant_method") and (module not in self.embeddings or module in self.lm_heads)
        if location.attribute != "weight" or not multiplies:
            held = getattr(module, location.attribute)[location.rows]
            return held[:, list(indices)] if held.dim() > 1 else held[:, None]
        ones = torch.zeros(len(indices), width, dtype=self.dtype, device=self.device)
        ones[range(len(indices)), list(indices)] = 1.0
        return module.quant_method.apply(module, ones, None)[:, location.rows].T

    # ------------------------------------------------------------ tokens

    def score_tokens(self, ids: Sequence[int]) -> tuple[Tensor, int]:
        """The log-probs of ids[1:] at temperature 1, and how many of these tokens came from the cache."""
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=False, detokenize=False
        )
        text = [{"prompt_token_ids": list(ids)}]
        [output] = self.llm.generate(text, sampling, use_tqdm=False, lora_request=self.adapter)
        found = [(of or {}).get(token) for of, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        return torch.tensor([float("nan") if x is None else x.logprob for x in found]), output.num_cached_tokens

    def add_request(self, key: Any, ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> None:
        """Ask for up to `most` tokens behind these."""
        sampling = self.vllm.SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            stop_token_ids=self.eos_ids,
            ignore_eos=True,  # of vLLM's own reckoning: the ends are those above
            detokenize=False,
        )
        number = str(next(self.request_numbers))
        self.unfinished[number] = key
        prompt = {"prompt_token_ids": list(ids)}
        self.llm.llm_engine.add_request(number, prompt, sampling, lora_request=self.adapter)

    def step(self) -> list[Said]:
        """Sample a token for each of those that are decoded. Return the answers that have ended with it."""
        ended = [output for output in self.llm.llm_engine.step() if output.finished]
        return [self._build_answer(output) for output in ended]

    def _build_answer(self, output: Any) -> Said:
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        logprobs = [of[token].logprob for of, token in zip(answer.logprobs, tokens, strict=True)]
        return Said(self.unfinished.pop(output.request_id), tokens, logprobs)

    def abort_all(self) -> None:
        """Forget what was asked and has not been answered."""
        self.llm.llm_engine.abort_request(list(self.unfinished))
        self.unfinished.clear()


def fixed_chance() -> Any:
    """vLLM sets and draws from the random numbers of the process, which are none of its business."""
    return torch.random.fork_rng(devices=[])


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
