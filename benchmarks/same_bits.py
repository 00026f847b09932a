"""Digests of a short run of every recipe: rollouts, metrics without times, evaluations and weights.

python benchmarks/same_bits.py before.json                  # record
python benchmarks/same_bits.py after.json --against before.json

Each recipe trains three steps of a tiny model, made here, on the CPU. To compare commits, run this file with the `src`
of each first in PYTHONPATH. Recipes with data are given a small file; `judge.toml` needs a service and is left out.
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
FITTED = {"minibatches =": {"algorithm.minibatches": 1}, "similarity_layer =": {"algorithm.similarity_layer": 1}}
"""Settings of recipes that do not fit a model and a step so small."""
TIMED = ("time/", "memory/")


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


def digest_of(run: Path) -> dict[str, str]:
    found = {}
    for name in ("rollouts.jsonl", "evals.jsonl", "metrics.jsonl"):
        path = run / name
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]
        found[name] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
    for path in sorted((run / "model").glob("*.safetensors")):
        found[f"model/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def digests(recipe: Path, model: Path, scratch: Path) -> dict[str, str]:
    words = ["--policy.model", str(model)]
    questions = scratch / "questions.jsonl"
    text = recipe.read_text()
    settings = dict(SETTINGS)
    if "data =" in text or 'name = "gsm8k"' in text:
        settings |= {"task.data": str(questions), "task.test_data": ""}
    for named, fitted in FITTED.items():
        settings |= fitted if named in text else {}
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    run = scratch / recipe.relative_to(ROOT).with_suffix("").as_posix().replace("/", "-")
    command = [sys.executable, "-m", "pellucid", "train", str(recipe), "--run", str(run), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return digest_of(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
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
            found = dict(
                zip(
                    (str(p.relative_to(ROOT)) for p in recipes),
                    pool.map(lambda p: digests(p, scratch / "model", scratch), recipes),
                    strict=True,
                )
            )
    arguments.output.write_text(json.dumps(found, indent=1))
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    for name, digest in found.items():
        state = "" if not before else "same" if before.get(name) == digest else "DIFFERENT"
        print(f"{name:50} {state} {digest.get('error', '')}")
    sys.exit(any(before.get(name) != digest for name, digest in found.items()) if before else 0)


if __name__ == "__main__":
    main()
