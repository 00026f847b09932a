"""Test the bytes and offsets of tokens in log-probs, with byte-level and SentencePiece-like tokenizers."""

from __future__ import annotations

import json
import urllib.request
from contextlib import contextmanager

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pellucid.policy.text import TokenBytes
from serving import post, running, saying_tokens

SPACE = "▁"


def byte_level():
    """Return a byte-level BPE with merges, so that tokens end inside a character or contain several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "i"),
        ("Ġi", "t"),
        ("i", "t"),
        ("æ", "ķ"),
        ("ð", "Ł"),
        ("ĻĤ", "!"),
        ("Ļ", "Ĥ"),
        ("T", "O"),
        ("P", "!"),
    ]
    merges.sort(key=lambda merge: merge == ("ĻĤ", "!"))
    words = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<s2>"])


def pieces():
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    return [*words, *(c for c in " !.OPSTabeiot"), SPACE, *(SPACE + c for c in "ait"), "it", f"{SPACE}it", "TO", "P!"]


def sentencepiece():
    """Return a tokenizer like Llama 2's, with bytes for unknown characters. It drops the first space of a text."""
    vocab = {piece: i for i, piece in enumerate(pieces())}
    merges = [("i", "t"), (SPACE, "it"), *((SPACE, c) for c in "ait"), ("T", "O"), ("P", "!")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<s2>"])


def metaspace():
    """Return a tokenizer like those of T5 and older Llamas: no bytes, and a decoder that drops the first space."""
    vocab = [(piece, -float(i)) for i, piece in enumerate([*pieces()[256:], "é", "数", "🙂"])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<s2>"])


MADE = {"byte level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}
TEXTS = ["a 数b 🙂! it", "é", "  it", "it STOP! it"]
CASES = [*((text, []) for text in TEXTS), (TEXTS[-1], ["STOP"]), (TEXTS[-1], ["OP"])]


@contextmanager
def saying(tokenizer, ids):
    """Serve a model that answers with these tokens. Yield the URL of the API, the request body and the prompt."""
    asked = tokenizer("a", add_special_tokens=False)["input_ids"]
    with running(policy=saying_tokens(tokenizer, asked, ids)) as (_, url):
        yield f"{url}/v1", {"temperature": 0, "max_tokens": len(ids)}, asked


def chat_of(tokenizer, url, body, asked):
    tokenizer.chat_template = "{{ messages[0].content }}"
    body = body | {"messages": [{"role": "user", "content": tokenizer.decode(asked)}], "logprobs": True}
    return post(f"{url}/chat/completions", body | {"top_logprobs": 3})[1]["choices"][0]


def streamed(url, body):
    """Return the choice of each chunk of a stream."""
    data = json.dumps(body | {"stream": True}).encode()
    asked = urllib.request.Request(f"{url}/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:])["choices"][0] for line in lines]


@pytest.mark.parametrize(("text", "stop"), CASES)
@pytest.mark.parametrize("kind", MADE)
def test_bytes_join_to_the_text_and_offsets_index_it(kind, text, stop):
    tokenizer = MADE[kind]()
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    right = tokenizer.decode(ids, skip_special_tokens=True)
    right = right[: min((right.index(one) for one in stop if one in right), default=len(right))]
    with saying(tokenizer, ids) as (url, body, asked):
        chat = chat_of(tokenizer, url, body | {"stop": stop}, asked)
        plain = body | {"prompt": asked, "logprobs": 3, "stop": stop}
        whole, parts = post(f"{url}/completions", plain)[1]["choices"][0], streamed(url, plain)
    assert chat["message"]["content"] == whole["text"] == "".join(part["text"] for part in parts) == right
    entries = chat["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == right
    for entry in entries:
        chosen = next(top for top in entry["top_logprobs"] if top["logprob"] == entry["logprob"])
        assert chosen == {key: entry[key] for key in ("token", "logprob", "bytes")}
    starts, before = [], b""
    for entry in entries:
        starts.append(len(before.decode(errors="ignore")))
        before += bytes(entry["bytes"])
    assert whole["logprobs"]["text_offset"] == starts
    for name, values in whole["logprobs"].items():
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] == values
    for part in parts[:-1]:  # no chunk has an offset beyond the text
        for offset in (part["logprobs"] or {"text_offset": ()})["text_offset"]:
            assert offset <= len(right)


def test_tokens_keep_their_space_and_equal_tokens_stay_separate():
    tokenizer = sentencepiece()
    [spaced, plain] = tokenizer.convert_tokens_to_ids([f"{SPACE}it", "it"])
    with saying(tokenizer, [spaced, spaced]) as (url, body, asked):
        choice = post(f"{url}/completions", body | {"prompt": asked, "logprobs": 2})[1]["choices"][0]
    assert choice["text"] == "it it"
    assert choice["logprobs"]["tokens"] == [" it", " it"]
    assert choice["logprobs"]["text_offset"] == [0, 2]
    tokens = TokenBytes(tokenizer)
    assert (tokens.format_token(spaced), tokens.format_token(plain)) == (" it", "it")
    assert (tokens.get_bytes(spaced), tokens.get_bytes(plain)) == (b" it", b"it")


def test_special_token_does_not_remove_the_space_of_the_next_token():
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids([f"{SPACE}it", "<s2>", f"{SPACE}it"])
    with saying(tokenizer, ids) as (url, body, asked):
        entries = chat_of(tokenizer, url, body, asked)
    assert entries["message"]["content"] == tokenizer.decode(ids, skip_special_tokens=True) == "it it"
    assert [entry["bytes"] for entry in entries["logprobs"]["content"]] == [list(b"it"), [], list(b" it")]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_half_a_character_has_its_bytes_and_an_escaped_name(kind):
    tokenizer = MADE[kind]()
    ids = tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1]
    with saying(tokenizer, ids) as (url, body, asked):
        chat = chat_of(tokenizer, url, body, asked)
    entries = chat["logprobs"]["content"]
    found = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert "🙂".encode().startswith(found.removeprefix(b" "))
    assert found.removeprefix(b" ")
    assert entries[-1]["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entries[-1]["bytes"])


@pytest.mark.parametrize("kind", MADE)
def test_every_token_has_the_bytes_it_adds_to_a_text(kind):
    """The tokenizer gives the expected text: that of the tokens when they are decoded after another token."""
    tokenizer = MADE[kind]()
    tokens = TokenBytes(tokenizer)
    first = tokenizer("a", add_special_tokens=False)["input_ids"]
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        both = tokenizer.decode([*first, *ids])
        assert b"".join(map(tokens.get_bytes, ids)).decode() == both.removeprefix(tokenizer.decode(first))
    assert tokens.get_bytes(tokenizer.eos_token_id) == b""
    assert tokens.format_token(tokenizer.eos_token_id) == "</s>"
