"""Chains of edits at different places, served by the engine's own parts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.errors import ConfigError
from kvshare_lab.fidelity.chains import EditedText

WORDS = ["seven", "12", "Ada", "of", "99", "Rome", "the", "Ben", "5"]
TEXT = "In 1894 the brewer Anton Greve paid for a lens of 48 centimetres and for 2 clocks of brass. " * 3


def edited(seed: int = 0) -> EditedText:
    return EditedText([TEXT], "the lens", WORDS, random.Random(seed))


def user(text: EditedText) -> list[str]:
    return str(text.chat.messages[1]["content"]).split()


def test_an_edit_changes_one_to_three_words_at_its_place() -> None:
    """Numbers become numbers, names names; other places stay as they are."""
    text = edited()
    for place in list(text.places):
        before = user(text)
        text.edit(place)
        after = user(text)
        changed = [at for at, words in enumerate(zip(before, after, strict=True)) if words[0] != words[1]]
        assert 1 <= len(changed) <= 3
        assert changed[-1] - changed[0] < 3
        for at in changed:
            assert before[at].isdigit() == after[at].isdigit()
            assert before[at][0].isupper() == after[at][0].isupper()


def test_places_are_drawn_and_apart() -> None:
    """Another seed has another order; edits of different places do not touch the same words."""
    places = edited().places
    assert sorted(places) == sorted(edited(1).places) != places != edited(1).places
    assert min(b - a for a, b in zip(sorted(places), sorted(places)[1:], strict=False)) >= 6  # three words


@pytest.mark.model
def test_a_chain_reports_what_was_expected_and_found() -> None:
    """What a turn inherits is what the turn before was expected to deviate; a fresh donor has nothing."""
    options = ["--model", "demo", "--chains", "1", "--turns", "5", "--prompt-tokens", "250", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", "fidelity", *options, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert list(document["by_turn"]) == ["1", "5"]
    (rows,) = document["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["inherited"] == 0
    for row in rows:
        assert row["expected"] >= row["inherited"]
        assert row["decision"] == "approx" or row["expected"] == row["kl"] == 0
    fresh = rows[-1]["fresh"]
    assert fresh["inherited"] == 0
    assert fresh["expected"] <= rows[-1]["expected"] or rows[-1]["decision"] != "approx"


@pytest.mark.model
def test_too_little_text_is_said(tmp_path: Path) -> None:
    options = ["--model", "demo", "--chains", "1", "--prompt-tokens", "90000"]
    result = CliRunner().invoke(app, ["bench", "fidelity", *options])
    assert isinstance(result.exception, ConfigError)
    assert "fewer than 90000 tokens" in str(result.exception)
