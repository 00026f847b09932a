"""Runs vLLM as a contender of bench.py, in a virtual environment of its own.

The engine runs in the contender's own process, which is the fastest way on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource

import turns

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["sample"])
    parser.add_argument("contender", choices=["vllm-eager", "vllm-compiled"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--chats", required=True, help="a JSON file: the prompts of each unit, as messages")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    turns.redirect_output()

    from vllm import LLM, SamplingParams  # noqa: PLC0415

    with open(options.chats) as file:
        units = json.load(file)
    engine = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=2048,
        enforce_eager=options.contender == "vllm-eager",
        enable_prefix_caching=True,
    )
    tokenizer = engine.get_tokenizer()
    sampling = SamplingParams(
        n=options.group, temperature=1.0, top_k=0, top_p=1.0, max_tokens=options.tokens, ignore_eos=True, logprobs=0
    )

    def run_unit(i: int) -> dict[str, float]:
        prompts = [
            {"prompt_token_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)}
            for chat in units[i % len(units)]
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return {"tokens": sum(len(c.token_ids) for output in outputs for c in output.outputs)}

    dtype = engine.llm_engine.model_config.dtype
    turns.take_turns(run_unit, dtype=str(dtype).removeprefix("torch."))
    turns.send_answer(peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


if __name__ == "__main__":
    main()
