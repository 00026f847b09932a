"""A task that compares siblings: one call grades all completions of a step."""

from dataclasses import dataclass

from pellucid.types import Prompt, Reward


@dataclass(frozen=True)
class Siblings:
    """The longest completion of a group gets 1. `text="short"` returns too few rewards; a completion "bad" raises."""

    seed: int = 0
    split: str = "train"
    text: str = ""

    def sample(self, step, n):
        return [Prompt(f"{step}/{i}", f"{self.text}{i}") for i in range(n)]

    def rewards(self, prompts, completions):
        if "short" in self.text:
            return [Reward(0.0)]
        if any(completion.text == "bad" for completion in completions):
            raise KeyError("bad")
        longest = {prompt.id: 0 for prompt in prompts}
        for prompt, completion in zip(prompts, completions, strict=True):
            longest[prompt.id] = max(longest[prompt.id], len(completion.text))
        return [
            Reward(float(len(completion.text) == longest[prompt.id]), extra={"of": len(completions)})
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
