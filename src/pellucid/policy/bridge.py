"""What stands between two turns of a conversation, in tokens.

What the policy has sampled is kept as token ids, and never tokenized again. Only what is between its turns is: the end
of its turn as the chat template writes it, the messages that follow, and the beginning of its next turn. It is cut out
of a short conversation of the same messages, so that a turn costs the same however long the conversation is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from pellucid.policy.literal import ids_of, tokenized
from pellucid.policy.template import FAULTS, QUESTION, shown
from pellucid.types import Message, UserError

SAID = "a7c1"
"""What the policy says in the short conversation."""
HEARD = "b2d9"


class Bridge(NamedTuple):
    """Token ids between two turns of the policy."""

    end: tuple[int, ...]
    """The end of a turn, which the policy has mostly sampled itself; empty where the template writes none."""
    rest: tuple[int, ...]


def bridge(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], eos_ids: Sequence[int]) -> Bridge:
    """Return what stands between two turns, given these messages. ends: the end-of-sequence tokens of the policy.

    UserError where the chat template does not show what follows a turn.
    """
    if not tokenizer.chat_template:
        text = "\n" + "".join(f"{message['content']}\n" for message in messages)
        return Bridge((), tuple(ids_of(tokenizer, text, literal=True)))
    messages, _ = shown(tokenizer, messages)

    def behind(marked: Sequence[Message]) -> str:
        # The call that precedes has the marked name, too: a name may spell the end of a turn.
        try:
            return behind_turn(tokenizer, beginning(marked), marked, eos_ids)
        except FAULTS as error:
            raise UserError(f"policy.template: {' '.join(str(error).split())}") from error

    ids = tuple(tokenized(tokenizer, behind, messages))
    return Bridge(ids[:1], ids[1:]) if ids[0] in eos_ids else Bridge((), ids)


def behind_turn(
    tokenizer: PreTrainedTokenizerBase,
    preceding: Sequence[Message],
    messages: Sequence[Message],
    eos_ids: Sequence[int],
) -> str:
    """Return what the template writes behind the turn that ends `before`, from the end-of-sequence token on."""
    text = rendered(tokenizer, [*preceding, *messages], True)
    said = text.find(SAID)
    marks = [str(tokenizer.decode([end])) for end in eos_ids]
    if found := [at for mark in marks if (at := text.find(mark, said)) >= 0]:
        return text[min(found) :]
    start = rendered(tokenizer, preceding, False)
    if not text.startswith(start):
        raise ValueError("the chat template writes no end of a turn, and writes it anew when something follows")
    return text[len(start) :]


def beginning(messages: Sequence[Message]) -> list[Message]:
    """Return a short conversation that these messages can follow: before those of tools, tools were called."""
    names = [message.get("name", "tool") for message in messages if message["role"] == "tool"]
    calls = [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}} for name in names[:1]]
    return [QUESTION, {"role": "assistant", "content": SAID, **({"tool_calls": calls} if calls else {})}]


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    conversation: Any = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, tokenize=False))


def check(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> str:
    """Return in a line what the chat template does to earlier turns, if it changes them.

    UserError where it shows nothing of what follows them.
    """
    if not tokenizer.chat_template:
        return ""
    for heard in ({"role": "user", "content": HEARD}, {"role": "tool", "name": "f", "content": HEARD}):
        between = bridge(tokenizer, [heard], eos_ids)
        if HEARD not in str(tokenizer.decode([*between.end, *between.rest])):
            raise UserError(f"policy.template: the chat template leaves out what the role {heard['role']} says")
    before = [QUESTION, {"role": "assistant", "content": f"<think>\n{HEARD}\n</think>\n\n{SAID}"}]
    start, text = (rendered(tokenizer, list, False) for list in (before, [*before, {**QUESTION, "content": HEARD}]))
    if text.startswith(start[: start.find(SAID) + len(SAID)]):
        return ""
    return (
        "policy.template: the chat template writes earlier turns anew when something follows, as without their"
        " thoughts: it is trained on what was sampled; to serve it alike, give a template that keeps them"
    )
