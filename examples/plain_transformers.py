"""Greedy accuracy of a trained model on the held-out sums and products, with transformers alone.

    python examples/plain_transformers.py runs/NAME/model

A run saves an ordinary checkpoint, so this file does not import Pellucid. It computes a second time which operands are
held out.
"""

import hashlib
import re
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def is_held_out(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < 0.25 * 2**64


@torch.no_grad()
def main(folder: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [(a, b) for a in range(10) for b in range(10) if is_held_out(a, b)]
    problems = [(f"{a} {op} {b}", a + b if op == "+" else a * b) for a, b in pairs for op in "+*"]
    right = 0
    for problem, result in problems:
        messages = [{"role": "user", "content": f"What is {problem}? Answer with the number only."}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        numbers = re.findall(
            r"\d+", tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
        right += bool(numbers) and int(numbers[-1]) == result
    print(f"{right} of {len(problems)} right: greedy accuracy {right / len(problems):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
