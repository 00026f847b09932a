"""Shared fixtures, and tiny models and tokenizers that need no network and no files."""

from __future__ import annotations

import gc
import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path

gc.disable()  # until all tests are collected: objects imported until then are permanent and need not be scanned

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import pretended_graph
import simulated_device
from pellucid import cli
from pellucid.policy.policy import Policy
from pellucid.types import Completion, Prompt, Reward
from pellucid.utils import text

# Every run has the same examples, stores none of them in files, and has no time limit per example.
hypothesis.settings.register_profile("suite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("suite")


def mostly_slow(cases, every):
    """Return test parameters of which only the first of each `every` runs by default. The others are marked as slow."""

    def slow(case):
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    return [slow(case) if i % every else case for i, case in enumerate(cases)]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


CHARACTERS = "0123456789+*-=? abcdefghijk"
EOS = len(CHARACTERS)
VOCAB = EOS + 1


def character_tokenizer(characters: str = CHARACTERS, size: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and pad == eos, as in many checkpoints, and filler words up to
    `size`.
    """
    known = [*characters, "<eos>"]
    vocab = {token: i for i, token in enumerate([*known, *(f" word{i}" for i in range(len(known), size))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, for any text, and two special tokens around a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


def tiny_llama_of(tokenizer: PreTrainedTokenizerFast, positions: int = 4096) -> PreTrainedModel:
    """Return a tiny Llama for this tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def tiny_llama(dropout: float = 0.0, positions: int = 128) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


KERNEL_SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": EOS,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
"""The smallest shape that every compiled kernel supports: heads of 64, widths that are multiples of 32, and a
vocabulary that is a multiple of 16.

Tests that compare runs across settings use it in bfloat16, because with smaller heads torch's operators compute
everything.
"""


def kernel_llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**KERNEL_SHAPE))


def kernel_qwen() -> PreTrainedModel:
    """Return a model with attention biases, like Qwen2.5."""
    model = Qwen2ForCausalLM(Qwen2Config(**KERNEL_SHAPE))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    return model


def tiny_gpt2(dropout: float = 0.5) -> PreTrainedModel:
    """Return a model with absolute positions and, by default, dropout everywhere."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        eos_token_id=EOS,
        bos_token_id=EOS,
        pad_token_id=EOS,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config)


def tiny_gemma() -> PreTrainedModel:
    """Return a model with sliding windows shorter than the prompts, and a soft-capped head."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        max_position_embeddings=128,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        final_logit_softcapping=3.0,
        initializer_range=0.3,
    )
    return Gemma3ForCausalLM(config)


ARCHITECTURES = {"llama": tiny_llama, "gpt2": tiny_gpt2, "gemma": tiny_gemma}
AT_KERNEL_SHAPE = {"llama, heads of 64": kernel_llama, "qwen2.5, heads of 64": kernel_qwen}


def make_policy(
    architecture: str = "llama",
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    seed: int = 0,
    entropy_grad: bool = False,
    gradient_checkpointing: bool = False,
    engine: str = "auto",
) -> Policy:
    """Return a policy. In bfloat16, "llama" has the shape that compiled kernels support, like real models."""
    torch.manual_seed(seed)
    if architecture == "llama" and dtype == torch.bfloat16:
        architecture = "llama, heads of 64"
    model = (ARCHITECTURES | AT_KERNEL_SHAPE)[architecture]()
    if dtype == torch.float64:
        model = model.double()
    tokenizer = character_tokenizer(size=model.config.vocab_size)
    return Policy(model, tokenizer, dtype, temperature, entropy_grad, gradient_checkpointing, engine=engine)


@dataclass(frozen=True)
class CountDigits:
    """A toy task that rewards the share of digits, of which a tiny random model produces some."""

    seed: int = 0
    split: str = "train"
    name: str = "digits"

    def sample(self, step: int, n: int) -> list[Prompt]:
        rng = random.Random(f"{self.seed}/{self.split}/{step}")
        return [
            Prompt(f"{self.split}/{step}/{i}", "abc"[: 1 + i % 3] + str(rng.randrange(10**6)) + "?") for i in range(n)
        ]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        digits = sum(c.isdigit() for c in completion.text)
        return Reward(digits / max(1, len(completion.text)), correct=digits > 3)


class OneProcessRuntime:
    """A fake runtime with plain SGD in one process."""

    world_size = 1

    def __init__(self, policy: Policy | None = None, lr: float = 0.0) -> None:
        self.policy, self.lr, self.gradients = policy, lr, {}

    def for_thread(self):
        return self

    def shard(self, items):
        return items

    def gather(self, items):
        return list(items)

    def sum(self, x):
        return x

    def compute_within_memory(self, compute, rows):
        return compute(rows)

    def accumulate(self, micro_batches):
        yield from micro_batches

    def backward(self, loss):
        loss.backward()

    def step(self):
        """Take a step, and store the gradients for the test."""
        parameters = self.policy.trainable()
        self.gradients = {name: p.grad.clone() for name, p in parameters.items()}
        with torch.no_grad():
            for p in parameters.values():
                p.sub_(self.lr * p.grad)
                p.grad = None
        return {
            "grad_norm": float(sum(g.square().sum() for g in self.gradients.values()) ** 0.5),
            "lr": self.lr,
            "skipped": 0.0,
            "idle": 0.0,
        }

    def adapt_lr(self, update_kl):
        pass


def products_know_no_neighbors():
    """Return whether a row of a bf16 product is identical for every number of rows, as on CPUs without AMX."""
    x, w = torch.randn(3, 96, 32).bfloat16(), torch.randn(3, 64, 32).bfloat16()
    whole, flat = x @ w.mT, F.linear(x[0], w[0])
    rows = (1, 3, 8, 40)
    # One in ten thousand of the sums that are added up in parts shows a difference.
    deep, v = torch.randn(200, 1536).bfloat16(), torch.randn(576, 1536).bfloat16()
    return (
        all(torch.equal(x[:, :n].contiguous() @ w.mT, whole[:, :n]) for n in rows)
        and all(torch.equal(F.linear(x[0, :n], w[0]), flat[:n]) for n in rows)
        and all(torch.equal(torch.cat([F.linear(few, v) for few in deep.split(n)]), F.linear(deep, v)) for n in (8, 40))
    )


@pytest.fixture
def pretended(monkeypatch):
    """Return simulated graphs in place of torch's CUDA graphs."""
    return pretended_graph.Graphs(monkeypatch)


@pytest.fixture
def gpu(pretended):
    """Yield an active simulated device."""
    if simulated_device.HAS_REAL_DEVICE:
        pytest.skip("there is a real one")
    with simulated_device.Device() as device:
        yield device


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_recipe_of_another_test():
    text.set_recipe_folder(None)


@pytest.fixture(scope="module")
def deepspeed_on_cpus(tmp_path_factory):
    """Let DeepSpeed compute on CPUs.

    It compiles its communication kernels and waits forever for a compilation that was killed halfway, so each module
    has its own folder of extensions.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")
        patched.setenv("DS_IGNORE_CUDA_DETECTION", "1")
        patched.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny_llama().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def kernel_dirs(tmp_path_factory):
    """Return the folders of the models of AT_KERNEL_SHAPE, by name."""
    made = {}
    for name, make in AT_KERNEL_SHAPE.items():
        made[name] = tmp_path_factory.mktemp("kernel")
        torch.manual_seed(0)
        make().save_pretrained(made[name])
        character_tokenizer(size=KERNEL_SHAPE["vocab_size"]).save_pretrained(made[name])
    return made


@pytest.fixture
def recipe(tmp_path, model_dir):
    return tiny_recipe(tmp_path / "tiny.toml", model_dir)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return a function that gives the folder of an uninterrupted run, made once, for comparison or copying."""
    made = {}

    def run(recipe, *settings):
        key = (recipe.read_text(), *map(str, settings))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            with pytest.raises(SystemExit) as ended:
                cli.main(["train", str(recipe), "--run", str(folder), *key[1:]])
            assert ended.value.code == 0
            made[key] = folder
        return made[key]

    return run


def tiny_recipe(path, model_dir):
    """Write a recipe of six steps for a tiny model, which take a second or two. Micro-batches differ in size."""
    path.write_text(
        f"""
        [policy]
        model = "{model_dir}"
        dtype = "float32"
        [task]
        name = "{Path(__file__).parent}/digits_task.py:Digits"
        [sampler]
        max_tokens = 10
        [algorithm]
        steps = 6
        prompts_per_step = 4
        group_size = 4
        epochs = 2
        minibatches = 2
        micro_batch = 5
        kl_coef = 0.01
        [optimizer]
        lr = 1e-2
        warmup = 2
        schedule = "cosine"
        [evaluate]
        every = 2
        n = 6
        k = 2
        [checkpoint]
        every = 2
        [log]
        tensorboard = true
        """
    )
    return path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def pytest_runtest_setup(item):
    if item.get_closest_marker("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed: make deepspeed")
