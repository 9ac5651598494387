"""What `kvshare bench acceptance` makes of its answers, and the methods that it knows."""

from __future__ import annotations

import numpy as np
import pytest

from kvshare.errors import ConfigError
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.vllm.acceptance import Config, _edited, summary
from kvshare_lab.vllm.client import Answer


def answered(steps: int, tokens: int, seconds: float) -> tuple[Answer, FinishedReport]:
    report = FinishedReport("1", "approx", None, num_answer_steps=steps, num_answer_tokens=tokens)
    return Answer(token_times_s=[0.1, seconds]), report


@pytest.mark.parametrize(
    ("full", "shared", "passed"),
    [((25, 100), (25, 100), True), ((25, 100), (50, 100), False), ((90, 100), (90, 100), False)],
)
def test_it_passes_only_where_enough_is_accepted_and_no_less_is(
    full: tuple[int, int], shared: tuple[int, int], passed: bool
) -> None:
    """A server whose full prefills accept next to nothing shows nothing."""
    found = summary({"full": [answered(*full, 2.0)], "shared": [answered(*shared, 1.0)]})
    assert found["passed"] == passed
    assert found["tokens_a_step"]["full"] == full[1] / full[0]
    assert found["answer_s_ratio"] == 0.5


def test_an_edited_prompt_differs_outside_of_what_both_have_in_common() -> None:
    prompt, edited, common = _edited(np.random.default_rng(0), 200)
    assert all(np.array_equal(prompt[s.start : s.end], edited[s.start : s.end]) for s in common)
    assert sum(map(len, common)) == 200 - 5 * 8 - 1
    assert (prompt != edited).sum() > 30


def test_methods() -> None:
    """The draft model is the target, and takes as many tokens."""
    assert Config().speculation("m")["method"] == "ngram"
    own = Config(method="draft").speculation("m")
    assert (own["model"], own["max_model_len"]) == ("m", Config().options.vllm.max_model_len)
    with pytest.raises(ConfigError, match="expected ngram or draft"):
        Config(method="eagle").speculation("m")
