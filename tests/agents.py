"""Agents as users write them, with the unmodified `openai` package."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import suppress

import openai


def asks(client, messages, **settings):
    return client.chat.completions.create(model="any", messages=messages, **settings)


def user(text):
    return {"role": "user", "content": text}


def solve(row, client):
    """Run the function that the row names."""
    return globals()[row.get("does", "talks")](row, client)


def talks(row, client):
    """Take three turns. The reward is the number of characters of the policy plus a hundredth of the counted tokens."""
    messages, worth = [user(row["question"])], 0.0
    for turn in range(row.get("turns", 3)):
        answer = asks(client, messages)
        messages += [answer.choices[0].message, user(f"{turn}?")]
        worth += len(answer.choices[0].message.content) + answer.usage.completion_tokens / 100
    return worth


def rewrites(row, client):
    """Replace the first question after two turns, and continue with an otherwise unchanged history."""
    messages = [user(row["question"])]
    for turn in range(4):
        messages += [asks(client, messages).choices[0].message, user(f"{turn}?")]
        if turn == 1:
            messages[0] = user("dd+")
    return float(len(row["question"]))


def forks(row, client):
    """Fork a child that exits and one that returns. The reward encodes how they ended."""
    asks(client, [user("a")])
    ended = []
    for exits in (True, False):
        child = os.fork()
        if not child:
            if exits:
                sys.exit(7)
            return 5.0
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return float(ended[0] + ended[1] / 10)


def raises(row, client):
    asks(client, [user("a")])
    raise ValueError("no idea")


def hangs(row, client):
    asks(client, [user("a")])
    while True:
        with suppress(BaseException):
            time.sleep(1.0)


def dies(row, client):
    asks(client, [user("a")])
    os._exit(3)


def is_silent(row, client):
    return 1.0


def returns_words(row, client):
    asks(client, [user("a")])
    return "good"


def returns_none(row, client):
    asks(client, [user("a")])


def goes_on(row, client):
    messages = [user("a")]
    while True:
        messages += [asks(client, messages).choices[0].message, user("b")]


def goes_on_until_refused(row, client):
    messages = [user("a")]
    reasons = []
    with suppress(openai.BadRequestError):
        while True:
            choice = asks(client, messages).choices[0]
            reasons.append(choice.finish_reason)
            messages += [choice.message, user("b")]
    return float(reasons[-1] == "length") + len(reasons) / 100


def never_gives_up(row, client):
    while True:
        with suppress(openai.BadRequestError):
            asks(client, [user("a")])


def floods(row, client):
    """Send many requests concurrently. The reward is how many of them got tokens."""
    heard = []

    def ask(number):
        with suppress(openai.BadRequestError):
            heard.append(asks(client, [user(f"{number}?")]).usage.completion_tokens)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(sum(tokens > 0 for tokens in heard))


def leaves_a_request(row, client):
    """Return while the policy still generates."""
    threading.Thread(target=lambda: asks(client, [user("a")]), daemon=True).start()
    time.sleep(row["seconds"])
    return 0.5


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def has_tools(row, client):
    """Talk with tools. The last request has no tools, so it counts as another history."""
    messages = [user("2*3?")]
    first = asks(client, messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls:
        given = json.loads(call.function.arguments)
        told = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] * given["b"])}
        messages.append(told)
    second = asks(client, messages, tools=TOOLS).choices[0]
    assert second.finish_reason == "stop"
    messages.append({"role": "assistant", "content": [{"type": "text", "text": second.message.content}]})
    messages.append(user("sure?"))
    third = asks(client, messages, tools=TOOLS).choices[0].message
    assert len({call.id for call in (*first.message.tool_calls, *third.tool_calls)}) == 3
    asks(client, [*messages, third, {**told, "tool_call_id": third.tool_calls[0].id}])
    return 1.0


def puts_words_into_its_mouth(row, client):
    """Continue after an answer that the policy did not give, and then after its last own answer."""
    messages = [user("a"), asks(client, [user("a")]).choices[0].message]
    messages += [{"role": "assistant", "content": "b"}, user("c")]
    messages.append(asks(client, messages).choices[0].message)
    asks(client, messages)
    return 1.0


def says_who_it_is(row, client):
    asks(client, [user(str(os.getpid()))])


def streams(row, client):
    settings = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(asks(client, [user("a")], max_tokens=3, **settings))
    *said, counted = chunks
    assert [chunk.choices[0].finish_reason for chunk in said][-1] in ("stop", "length")
    assert counted.usage.completion_tokens <= 3
    called = list(asks(client, [user("a")], tools=TOOLS, **settings)) if row.get("tools") else []
    names = [call.function.name for chunk in called[:-1] for call in chunk.choices[0].delta.tool_calls or ()]
    assert names == (["multiply"] if called else [])
    return float(len("".join(chunk.choices[0].delta.content or "" for chunk in said)))


def is_limited(row, client):
    """Ask for two tokens, then for as many as allowed."""
    few = asks(client, [user("a")], max_completion_tokens=2)
    many = asks(client, [user("b")])
    assert (few.choices[0].finish_reason == "length") == (few.usage.completion_tokens == 2)
    return few.usage.completion_tokens + many.usage.completion_tokens / 100


def is_mistaken(row, client):
    """Send invalid requests, each of which is refused with a message, and then a valid one."""
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{"}}
    wrong = (
        ([user("a")], {"n": 2}),
        ([user("a")], {"logprobs": True}),
        ([], {}),
        ([user(picture)], {}),
        ([{"role": "assistant", "tool_calls": [call]}], {}),
        ([user("refused")], {}),
    )
    told = []
    for messages, settings in wrong:
        try:
            asks(client, messages, **settings)
        except openai.BadRequestError as error:
            told.append(error.body["message"])
    other = client.with_options(base_url=str(client.base_url).replace("/rollout/", "/rollout/x"))
    try:
        asks(other, [user("a")])
    except openai.NotFoundError as error:
        told.append(error.body["message"])
    print("\n".join(told))
    assert [model.id for model in client.models.list()] == ["policy"]
    asks(client, [user("a")])
    return float(len(told))


def draws(row, client):
    """Draw from Python's random numbers."""
    import random  # noqa: PLC0415

    asks(client, [user("ab"[random.randrange(2)] * random.randrange(1, 9) + "+")])
    return random.random()


async def together(row, client):
    """Use an own asynchronous client from the environment and the given one concurrently."""
    own = openai.AsyncOpenAI(max_retries=0)
    assert str(own.base_url) == str(client.base_url)
    both = await asyncio.gather(*(one.chat.completions.create(model="", messages=[user("a")]) for one in (client, own)))
    return float(len(both))


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if asked["question"] == "broken":
        sys.exit(3)
    print("a line before the last")
    print("good" if asked["question"] == "words" else talks(asked, openai.OpenAI()))
