"""Tests that a prompt gets the tokenizer's begin token at most once, and no end token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conftest import tiny_llama_of
from pellucid.policy.policy import Policy
from pellucid.types import Prompt
from serving import post, running

TEXT = "12?"
MESSAGES = ({"role": "user", "content": TEXT},)
TEMPLATE = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tokenizer_of(puts, template=None):
    """Return a tokenizer with one token per letter; `puts` is the template around a text, `$A`."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *"0123456789?a\n"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    specials = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single=puts, special_tokens=specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def shown(tokenizer, prompt):
    return tokenizer.decode(Policy(tiny_llama_of(tokenizer), tokenizer).encode(prompt))


@pytest.mark.parametrize(
    ("puts", "before"), [("<s> $A", "<s>"), ("<s> $A </s>", "<s>"), ("$A </s>", ""), ("$A", "")], ids=str
)
@pytest.mark.parametrize("literal", [False, True])
def test_encode_adds_at_most_one_begin_token_and_no_end_token(puts, before, literal):
    plain, chatty = tokenizer_of(puts), tokenizer_of(puts, TEMPLATE)
    for tokenizer in (plain, chatty):
        assert shown(tokenizer, Prompt("p", TEXT)) == f"{before}{TEXT}"
        assert shown(tokenizer, Prompt("p", f"<s>{TEXT}")) == f"<s>{TEXT}", "it is written there"
        assert shown(tokenizer, Prompt("p", f"<s><s>{TEXT}")) == f"<s><s>{TEXT}", "twice, by whoever wrote it"
        assert shown(tokenizer, Prompt("p", f"{TEXT}</s>")) == f"{before}{TEXT}</s>"
    assert shown(plain, Prompt("p", MESSAGES, escape_special_tokens=literal)) == f"{before}{TEXT}\n"
    assert shown(chatty, Prompt("p", MESSAGES, escape_special_tokens=literal)) == f"<s>{TEXT}"


@pytest.mark.parametrize("prompt", [TEXT, f"<s>{TEXT}"])
def test_served_prompt_has_one_begin_token_and_no_end_token(prompt):
    tokenizer = tokenizer_of("<s> $A </s>")
    with running(policy=Policy(tiny_llama_of(tokenizer), tokenizer)) as (_, url):
        status, answer = post(f"{url}/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 2})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 1 + len(TEXT)
