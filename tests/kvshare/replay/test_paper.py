"""The paper's figures on a log whose answer is known."""

import json
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from kvshare.errors import LogError
from kvshare.replay.options import ReplayOptions
from kvshare.replay.paper import _Neighbours, replay_paper
from kvshare.replay.policies import parse_policies
from kvshare.settings import load_settings
from tests.kvshare.replay.synthetic import FakeEmbedder, request

FORM = " ".join(f"fact{number} about thing{number}" for number in range(40))
PROMPTS = [
    f"{FORM} for Anna",
    "something quite different",
    f"{FORM} for Bert",
    f"{FORM} for Anna",  # identical
    "another matter altogether here",
]


def _options(log: Path, policies: str) -> ReplayOptions:
    """Results go where the log is."""
    return ReplayOptions([log], log.parent, parse_policies(policies), load_settings(), tokenizer="demo")


def test_figures_2_and_4(tmp_path: Path) -> None:
    """One identical, one similar prompt of five; the Similar subset is the two forms, no duplicate."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    options = _options(log, "prefix,kvshare-semantic-open,oracle")
    reported: list[tuple[int, int | None]] = []
    document = replay_paper(
        options, embedder=FakeEmbedder(), report=lambda done, total: reported.append((done, total))
    )
    assert document["figure_2"]["shares"] == pytest.approx({"identical": 0.2, "similar": 0.2, "unique": 0.6})
    figure_4 = document["figure_4"]
    assert (figure_4["num_prompts"], figure_4["num_duplicates"]) == (2, 1)
    for arm in figure_4["arms"]:
        assert sum(arm["shares"]) == pytest.approx(1.0)
        assert arm["at_least"]["90"] == 0.5, "the first of the two has nobody before it"
    assert json.loads((tmp_path / "paper.json").read_text(encoding="utf-8")) == document
    assert reported == sorted(reported), "both passes count up"
    assert reported[0] == (5, 10)
    assert reported[-1] == (10, 10)
    for name, marked in (("figure-2", ["36.0 %"]), ("figure-4", ["60.0 %", "50.0 %", "20.0 %"])):
        drawing = unescape((tmp_path / f"{name}.svg").read_text(encoding="utf-8"))
        assert drawing.startswith("<svg")
        assert "fact3" not in drawing
        assert drawing.count("the paper's") == len(marked)
        assert all(f">{share}  the paper's" in drawing for share in marked)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_only_a_sessions_first_row_is_a_first_prompt(tmp_path: Path) -> None:
    """AIBrix names sessions and no turns."""
    log = tmp_path / "log.jsonl"
    rows = [{"timestamp_ms": n, "prompt": PROMPTS[n], "session_id": "aba"[n]} for n in range(3)]
    log.write_text("".join(json.dumps({**row, "output_tokens": 4}) + "\n" for row in rows), encoding="utf-8")
    options = _options(log, "prefix")
    document = replay_paper(options, embedder=FakeEmbedder())
    assert document["figure_2"]["num_prompts"] == 2


def test_a_log_without_first_turns_is_told(tmp_path: Path) -> None:
    """Mooncake's traces do not say which requests begin a conversation."""
    log = tmp_path / "trace.jsonl"
    log.write_text('{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n')
    options = _options(log, "prefix")
    with pytest.raises(LogError, match="no first turns"):
        replay_paper(options, embedder=FakeEmbedder())


def test_nearness_is_that_of_every_pair() -> None:
    """The nearest earlier one of the same namespace, whatever the batches are, shelves that grow included."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((20, 8))
    vectors = (centres[draw.integers(0, 20, 300)] + 0.4 * draw.standard_normal((300, 8))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    prompts = [
        (request(number, [number, number + 1], namespace=f"tenant{number % 2}"), vector)
        for number, vector in enumerate(vectors)
    ]
    neighbours = _Neighbours()
    for start in range(0, len(prompts), 32):
        neighbours.add(prompts[start : start + 32])
    distances = 1 - vectors @ vectors.T
    same = np.equal.outer(np.arange(300) % 2, np.arange(300) % 2)
    earlier = np.where(np.tri(300, k=-1, dtype=bool) & same, distances, 2.0).min(axis=1)
    either = np.where(same & ~np.eye(300, dtype=bool), distances, 2.0).min(axis=1)
    shares = {one["distance"]: one["share"] for one in neighbours.figure_2()["by_distance"]}
    assert 0 < shares[0.05] < shares[0.1]
    assert shares == pytest.approx({limit: (earlier <= limit).mean() for limit in shares})
    assert neighbours.similar == set(np.flatnonzero(either <= 0.05).tolist())


def test_an_empty_similar_subset_is_drawn_as_such(tmp_path: Path) -> None:
    """Nobody has a similar one: the figure says so, and no arm gets a share of nothing."""
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": PROMPTS[1]}) + "\n", encoding="utf-8")
    options = _options(log, "prefix")
    replay_paper(options, embedder=FakeEmbedder())
    drawing = (tmp_path / "figure-4.svg").read_text(encoding="utf-8")
    assert "the subset is empty" in drawing
    assert ">0.0 %</text>" not in drawing
