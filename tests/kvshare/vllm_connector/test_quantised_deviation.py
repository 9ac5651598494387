"""How far answers of a real model deviate after shared KV of 8 bits, next to the same KV of 32 bits."""

from __future__ import annotations

from itertools import islice
from math import exp
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Span
from kvshare.sharing.calibration import OF_EIGHT_BITS

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
    from kvshare_lab.vllm.form_pairs import Pair
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Copies, Start, Vllm

PAIRS, MOST_TOKENS = 12, 500
REPAIRED = 8  # tokens at the start of a stretch that are computed again
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_logprobs": -1}


@pytest.mark.long
@pytest.mark.chat_model
def test_a_real_models_answers_deviate_by_what_is_added_for_eight_bits(
    start: Start, copies: Copies, record_property: Any
) -> None:
    """Forms that two users filled in: the first token of the edited one, shared and computed."""
    from kvshare.chat_model.prepare import prepare
    from kvshare_lab.vllm.form_pairs import form_pairs

    model = prepare()
    pairs = list(islice(form_pairs(str(model), MOST_TOKENS, seed=38), PAIRS))
    found = {}
    for dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
        vllm = start(model, kv_cache_dtype=dtype, **OPTIONS)
        found[dtype] = [deviation(vllm, pair, copies) for pair in pairs]
        record_property(dtype, [round(each, 5) for each in found[dtype]])
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        assert sum(found[dtype]) <= OF_EIGHT_BITS * sum(found["auto"])


def deviation(vllm: Vllm, pair: Pair, copies: Copies) -> float:
    """KL of the first token, nats: of what is computed from what is shared."""
    donor = vllm.store(pair.prompt.tolist(), max_tokens=1)
    plan = [copy for span, place in pair.common for copy in moved(donor, span, place, copies)]
    shared, event = vllm.shared(pair.edited.tolist(), plan, max_tokens=1, logprobs=-1)
    assert event.decision == "approx"
    return divergence(vllm.plain(pair.edited.tolist(), max_tokens=1, logprobs=-1), shared)


def moved(donor: FinishedReport, span: Span, place: int, copies: Copies) -> list[WireCopy]:
    """Copies of a stretch, without its beginning unless the prompt begins there."""
    start = span.start + (REPAIRED if span.start else 0)
    return copies(donor, (start, span.end), shift=place - span.start)


def divergence(one: Answer, other: Answer) -> float:
    a, b = one.logprobs[0], other.logprobs[0]
    return sum(exp(a[token]) * (a[token] - b[token]) for token in a)
