"""The paper's figures on a log whose answer is known."""

import json
from pathlib import Path

import pytest

from kvshare.replay.arms import parse_arms
from kvshare.replay.options import ReplayOptions
from kvshare.replay.paper import replay_paper
from kvshare.settings import load_settings
from tests.kvshare.replay.synthetic import FakeEmbedder

FORM = " ".join(f"fact{number} about thing{number}" for number in range(40))
PROMPTS = [
    f"{FORM} for Anna",
    "something quite different",
    f"{FORM} for Bert",
    f"{FORM} for Anna",  # identical
    "another matter altogether here",
]


def test_figures_2_and_4(tmp_path: Path) -> None:
    """One identical, one similar prompt of five; the Similar subset is the two forms, no duplicate."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    options = ReplayOptions(
        paths=[log],
        out=tmp_path,
        arms=parse_arms("prefix,kvshare-semantic-open,oracle"),
        settings=load_settings(),
    )
    document = replay_paper(options, embedder=FakeEmbedder())
    assert document["figure_2"]["shares"] == pytest.approx({"identical": 0.2, "similar": 0.2, "unique": 0.6})
    figure_4 = document["figure_4"]
    assert (figure_4["num_prompts"], figure_4["num_duplicates"]) == (2, 1)
    for arm in figure_4["arms"]:
        assert sum(arm["shares"]) == pytest.approx(1.0)
        assert arm["at_least"]["90"] == 0.5, "the first of the two has nobody before it"
    assert json.loads((tmp_path / "paper.json").read_text(encoding="utf-8")) == document
    for name in ("figure-2.svg", "figure-4.svg"):
        drawing = (tmp_path / name).read_text(encoding="utf-8")
        assert drawing.startswith("<svg")
        assert "fact3" not in drawing
