"""Tests of custom chat templates and their variables: used in training, saved with the model, refused in one line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from conftest import character_tokenizer
from pellucid import cli, config
from pellucid.policy import load
from pellucid.policy.chat_template import ChatTemplate
from pellucid.types import UserError

THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}=={% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
OWN = "{% for m in messages %}a{{ m.content }}b{% endfor %}{% if add_generation_prompt %}c{% endif %}"


def asked(tokenizer):
    messages = [{"role": "user", "content": "1+1?"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_variable_equals_the_same_argument_of_apply_chat_template():
    """The reference is transformers: the same variable, passed to `apply_chat_template`."""
    tokenizer, told = character_tokenizer(), character_tokenizer()
    tokenizer.chat_template = told.chat_template = THINKING
    for value in (False, True):
        ChatTemplate(variables={"enable_thinking": value}).apply_to_tokenizer(told)
        messages = [{"role": "user", "content": "1+1?"}]
        assert asked(told) == tokenizer.apply_chat_template(messages, enable_thinking=value, tokenize=False)
        told.chat_template = THINKING
    assert asked(tokenizer) == "1+1?"


def test_custom_template_is_loaded_and_saved(model_dir, tmp_path):
    (tmp_path / "own.jinja").write_text(OWN)
    _, tokenizer = load.load_pretrained(str(model_dir), torch.float32, ChatTemplate(str(tmp_path / "own.jinja")))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert asked(AutoTokenizer.from_pretrained(tmp_path / "saved")) == asked(tokenizer) == "a1+1?bc"


REFUSED = {
    "cannot be read (No such file or directory)": ("", {}),
    "line 1: Unexpected end of template": ("{% for m in messages %}", {}),
    "leaves the question out": ("c", {}),
    "the chat template does not use enable_thinkin": (THINKING, {"enable_thinkin": False}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_invalid_templates_are_refused_in_one_line(said, tmp_path):
    text, values = REFUSED[said]
    file = tmp_path / "own.jinja"
    if text:
        file.write_text(text)
    with pytest.raises(UserError, match=r"policy\.template") as refused:
        ChatTemplate(str(file), values).apply_to_tokenizer(character_tokenizer())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_variables_without_a_template_are_refused():
    with pytest.raises(UserError, match="no chat template of its own"):
        ChatTemplate(variables={"enable_thinking": False}).apply_to_tokenizer(character_tokenizer())


def test_run_uses_its_template_and_saves_it_with_the_model(recipe, tmp_path):
    (tmp_path / "own.jinja").write_text(THINKING)
    words = ["--policy.template", str(tmp_path / "own.jinja"), "--policy.template-kwargs", "enable_thinking", "False"]
    assert config.load_config(recipe, words).policy.template_kwargs == {"enable_thinking": False}
    few = ["--algorithm.steps", "1", "--evaluate.every", "0"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(recipe), "--run", str(tmp_path / "run"), *words, *few])
    assert ended.value.code == 0
    assert asked(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == "==1+1?"
    assert config.load_config(tmp_path / "run" / "config.json").policy.template_kwargs == {"enable_thinking": False}


@pytest.mark.slow
def test_a_resume_refuses_a_template_that_has_changed(recipe, tmp_path, capsys):
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    few = ["--algorithm.steps", "2", "--evaluate.every", "0", "--policy.template", str(file)]
    with pytest.raises(SystemExit):
        cli.main(["train", str(recipe), "--run", str(tmp_path / "run"), *few])
    file.write_text(THINKING)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--resume", str(tmp_path / "run"), "--algorithm.steps", "3"])
    assert ended.value.code == 2
    assert "was trained with policy.template = a file of sha256" in capsys.readouterr().err
