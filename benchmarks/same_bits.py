"""Computes digests of a short run of each recipe, which show whether two commits train to the same bits.

    python benchmarks/same_bits.py before.json                  # record
    python benchmarks/same_bits.py after.json --against before.json

The digests are of rollouts, metrics without times, evaluations, and weights. Each recipe trains a tiny random model for
three steps on the CPU. To compare commits, run this file with the `src` of each first in PYTHONPATH. Recipes with data
read a small file instead. `judge.toml` is left out because it needs a server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = "0123456789+-*/=?., abcdefghijklmnopqrstuvwxyz<>\\{}()#$%'\""
SETTINGS = {
    "policy.dtype": "float32",
    "sampler.max_tokens": 8,
    "algorithm.steps": 3,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 4,
    "algorithm.micro_batch": 4,
    "evaluate.every": 2,
    "evaluate.n": 2,
    "evaluate.k": 2,
    "checkpoint.every": 2,
}
OVERRIDES = {"minibatches =": {"algorithm.minibatches": 1}, "similarity_layer =": {"algorithm.similarity_layer": 1}}
"""Settings for recipes that do not fit such a small model and step, by a string that their files contain."""
TIMED = ("time/", "memory/")
"""Prefixes of metrics that differ between runs."""


def make_model(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*CHARACTERS, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        eos_token_id=len(CHARACTERS),
        bos_token_id=None,
        pad_token_id=len(CHARACTERS),
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def compute_digests(run: Path) -> dict[str, str]:
    """Return a digest of each file of a run."""
    digests = {}
    for name in ("rollouts.jsonl", "evals.jsonl", "metrics.jsonl"):
        path = run / name
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]
        digests[name] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
    for path in sorted((run / "model").glob("*.safetensors")):
        digests[f"model/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digests


def train_recipe(recipe: Path, model: Path, scratch: Path) -> dict[str, str]:
    """Train a recipe in `scratch`, and return the digests of the run or the last line of its error."""
    flags = ["--policy.model", str(model)]
    questions = scratch / "questions.jsonl"
    text = recipe.read_text()
    settings = dict(SETTINGS)
    if "data =" in text or 'name = "gsm8k"' in text:
        settings |= {"task.data": str(questions), "task.test_data": ""}
    for setting, overrides in OVERRIDES.items():
        settings |= overrides if setting in text else {}
    for key, value in settings.items():
        flags += [f"--{key}", str(value)]
    run = scratch / recipe.relative_to(ROOT).with_suffix("").as_posix().replace("/", "-")
    command = [sys.executable, "-m", "pellucid", "train", str(recipe), "--run", str(run), *flags]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if process.returncode:
        return {"error": (process.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return compute_digests(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier output to compare with")
    parser.add_argument("--only", default="", help="a part of the paths of recipes")
    arguments = parser.parse_args()
    recipes = [
        p
        for p in sorted((ROOT / "recipes").rglob("*.toml"))
        if "[variants" not in p.read_text() and p.stem != "judge" and arguments.only in str(p)
    ]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        make_model(scratch / "model")
        rows = [{"question": f"what is {i} + 1?", "answer": f"count on.\n#### {i + 1}"} for i in range(60)]
        (scratch / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = dict(
                zip(
                    (str(p.relative_to(ROOT)) for p in recipes),
                    pool.map(lambda p: train_recipe(p, scratch / "model", scratch), recipes),
                    strict=True,
                )
            )
    arguments.output.write_text(json.dumps(digests, indent=1))
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    names = [name for name in sorted(before.keys() | digests.keys()) if arguments.only in name]
    for name in names:
        state = "" if not before else "same" if before.get(name) == digests.get(name) else "DIFFERENT"
        print(f"{name:50} {state} {digests.get(name, {'error': 'no such recipe now'}).get('error', '')}")
    sys.exit(any(before.get(name) != digests.get(name) for name in names) if before else 0)


if __name__ == "__main__":
    main()
