"""Test `pellucid list`: complete lists in lines that fit, without torch, whose import takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from pellucid import cli, config
from pellucid.algorithm import advantages, objectives
from pellucid.algorithm.settings import AdvantageName, KLEstimatorName, ObjectiveName
from pellucid.rewards.terms import BUILTIN_TERMS
from pellucid.tasks import TASKS
from pellucid.types import UserError
from pellucid.utils.text import extract_first_sentence

THERE = {
    "tasks": list(TASKS),
    "rewards": [*BUILTIN_TERMS, "judge", "model:FOLDER_OR_HUB_ID"],
    "advantages": list(get_args(AdvantageName)),
    "objectives": list(get_args(ObjectiveName)),
    "aggregates": list(objectives.AGGREGATES),
    "kl": list(get_args(KLEstimatorName)),
    "samplers": ["native", "hf", "vllm", "sglang"],
    "recipes": list(config.describe_recipes()),
}


def lines(kind, capsys):
    assert cli.print_kind(kind) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("kind", THERE)
def test_every_name_has_a_line_with_a_description(kind, capsys):
    shown = [line.split(maxsplit=1) for line in lines(kind, capsys)]
    assert [name for name, _ in shown] == THERE[kind]
    assert all(len(text) > 10 for _, text in shown)


@pytest.mark.parametrize("kind", cli.LISTABLE_KINDS)
def test_lines_fit_the_width_and_align_in_columns(kind, capsys):
    found = lines(kind, capsys)
    assert max(map(len, found)) <= cli.LISTING_WIDTH
    assert len({line.index(line.split(maxsplit=1)[1]) for line in found}) == 1
    assert all(line.isprintable() for line in found)


def test_a_line_is_the_first_sentence_of_the_docstring(capsys):
    said = dict(line.split(maxsplit=1) for line in lines("advantages", capsys))
    assert said["centered"] == "r - mean (Dr. GRPO, arXiv 2503.20783)."
    assert said["raw"].startswith((advantages.raw_rewards.__doc__ or "?").partition("\n")[0])
    estimators = dict(line.split(maxsplit=1) for line in lines("kl", capsys))
    assert estimators["exact"] == 'For kl = "exact" the policy itself sums over the vocabulary.'
    recipe = dict(line.split(maxsplit=1) for line in lines("recipes", capsys))["variants/sapo"]
    assert f"# {recipe}" == Path("recipes/variants/sapo.toml").read_text().splitlines()[0]


def test_unknown_kind_suggests_a_similar_one():
    with pytest.raises(UserError, match='no list of "reward"; did you mean "rewards"'):
        cli.print_kind("reward")


def test_no_torch_is_imported():
    kinds = ", ".join(repr(kind) for kind in THERE)
    code = f"import sys; from pellucid import cli\nfor kind in ({kinds}): cli.print_kind(kind)"
    subprocess.run(
        [sys.executable, "-c", f"{code}\nassert 'torch' not in sys.modules"], check=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One. Two.", "One."),
        ("No end", "No end"),
        ("By Dr. Who (cf. Dr. No). Two.", "By Dr."),
        ("r - mean (Dr. GRPO). Two.", "r - mean (Dr. GRPO)."),
        ("0.5 of\nall. Two", "0.5 of all."),
        ("A head\n\nA body. And more.", "A head"),
        ("", ""),
    ],
)
def test_first_sentence_is_extracted(docstring, sentence):
    assert extract_first_sentence(docstring) == sentence


def test_list_without_a_kind_prints_all_kinds_under_headings(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["list"])
    assert ended.value.code == 0
    sections = [part.splitlines() for part in capsys.readouterr().out.rstrip().split("\n\n")]
    assert [heading for heading, *_ in sections] == list(cli.LISTABLE_KINDS)
    for heading, *lines in sections:
        cli.print_kind(heading)
        assert capsys.readouterr().out.splitlines() == lines
