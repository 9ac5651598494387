"""What `kvshare bench acceptance` makes of its answers, and the methods that it knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from delta_tree import Span
from kvshare.demo import MODEL_PATH
from kvshare.errors import ConfigError
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.vllm.acceptance import Config, _behind_repairs, _edited, _models, summary
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.form_pairs import form_pairs


def answered(steps: int, tokens: int, seconds: float) -> tuple[Answer, FinishedReport]:
    report = FinishedReport("1", "approx", None, num_answer_steps=steps, num_answer_tokens=tokens)
    return Answer(token_times_s=[0.1, seconds]), report


@pytest.mark.parametrize(
    ("full", "shared", "seconds", "passed"),
    [
        ((25, 100), (25, 100), 1.0, True),
        ((25, 100), (25, 100), 2.1, False),
        ((25, 100), (50, 100), 1.0, False),
        ((90, 100), (90, 100), 1.0, False),
    ],
)
def test_it_passes_only_where_enough_is_accepted_no_less_is_and_answers_are_not_later(
    full: tuple[int, int], shared: tuple[int, int], seconds: float, passed: bool
) -> None:
    """A server whose full prefills accept next to nothing shows nothing."""
    found = summary({"full": [answered(*full, 2.0)], "shared": [answered(*shared, seconds)]})
    assert found["passed"] == passed
    assert found["tokens_a_step"]["full"] == full[1] / full[0]
    assert found["answer_s_ratio"] == seconds / 2
    assert found["share_interval"]["low"] == found["share_interval"]["high"]  # of a single prompt


def test_some_tokens_after_each_edit_are_computed_again() -> None:
    """The equal prefix stays, and what is shorter than that is not copied."""
    common = [(Span(0, 10), 0), (Span(20, 50), 22), (Span(60, 84), 66)]
    assert _behind_repairs(common, 24) == [(Span(0, 10), 0), (Span(44, 50), 46)]


def test_an_edited_prompt_differs_outside_of_what_both_have_in_common() -> None:
    pair = _edited(np.random.default_rng(0), 200)
    assert all(
        start == s.start and np.array_equal(pair.prompt[s.start : s.end], pair.edited[s.start : s.end])
        for s, start in pair.common
    )
    assert sum(len(span) for span, _ in pair.common) == 200 - 5 * 8 - 1
    assert (pair.prompt != pair.edited).sum() > 30


def test_pairs_of_a_chat_model_are_forms_that_two_users_filled_in() -> None:
    pair = next(form_pairs(str(MODEL_PATH), 4000, seed=0))
    assert not np.array_equal(pair.prompt, pair.edited)
    for span, start in pair.common:
        assert np.array_equal(pair.prompt[span.start : span.end], pair.edited[start : start + len(span)])
        assert start + len(span) < len(pair.edited)
    assert 2 * sum(len(span) for span, _ in pair.common) >= len(pair.edited)


def test_methods() -> None:
    """The draft model is the target, and takes as many tokens."""
    assert Config().speculation("m")["method"] == "ngram"
    own = Config(method="draft").speculation("m")
    assert (own["model"], own["max_model_len"]) == ("m", Config().options.vllm.max_model_len)
    assert Config(method="eagle").speculation("h") == {
        "method": "eagle",
        "num_speculative_tokens": 3,
        "model": "h",
    }
    assert Config(method="mtp").speculation("m") == {"method": "mtp", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="expected one of ngram, draft, eagle, eagle3, mtp"):
        Config(method="medusa").speculation("m")


def test_a_model_that_is_not_random_needs_a_head(tmp_path: Path) -> None:
    for method in ("eagle", "eagle3"):
        with pytest.raises(ConfigError, match="expected a head"):
            _models(Config(method=method, model="a/model"), tmp_path)
        own = Config(method=method, model="a/model", head=tmp_path)
        assert _models(own, tmp_path) == ("a/model", str(tmp_path))
    with pytest.raises(ConfigError, match="no random model"):
        _models(Config(method="eagle3", head=tmp_path), tmp_path)


def test_a_layer_that_drafts_is_in_its_models_folder(tmp_path: Path) -> None:
    assert _models(Config(method="mtp", model="a/model"), tmp_path) == ("a/model", "a/model")
