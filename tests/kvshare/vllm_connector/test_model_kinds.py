"""
What is shared with each kind of model that vLLM serves, on tiny ones with random weights.

With OMP_NUM_THREADS=1, -m "vllm or long", -k eager and --junit-xml it writes what
lab/scripts/models_table.py reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvshare.vllm_protocol.salts import private_salt
from kvshare_lab.bench.random_models import ARCHITECTURES
from kvshare_lab.vllm.kinds import MULTIMODAL, NOT_HERE, TEXT, TEXT_TOKENS

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Copies, Start, Vllm

LIMIT = 1e-4  # log-probability, float32
CLEARLY = 1e-3  # that of KV of other text
MANY = 12  # tokens of an answer that goes on while others are computed
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))

# Of which one start each is worth the time of every run of the tests.
IN_EVERY_RUN = ("gemma4-mm", "qwen3-vl")
NO_MEDIA = {
    "image": 0,
    "video": 0,
}  # the tower is not loaded; embeddings may be sent, so batches are embedded
STATES = ("lfm2",)  # beside attention: vLLM cannot keep both in one group
SAME_POSITION = ("gpt2", "opt")  # learned positions
UNSHARED = {
    "lfm2": "hybrid",
    "mistral-window": "SlidingWindowSpec",
}
SHARED = sorted({*ARCHITECTURES, *TEXT, *MULTIMODAL} - {*UNSHARED, *NOT_HERE})

Record = Callable[[str, object], None]


def _params(names: list[str]) -> list[object]:
    return [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in sorted(names)
    ]


def _text(length: int, seed: int) -> list[int]:
    """Random text without a token that marks a place of media."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, TEXT_TOKENS, length)]


def _first_differs(one: Answer, other: Answer) -> float:
    """How far log-probabilities of the first token are apart, at most; infinite without a common one."""
    a, b = one.logprobs[0], other.logprobs[0]
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))


@pytest.fixture
def kind(request: pytest.FixtureRequest, start: Start, record_property: Record) -> Vllm:
    """A vLLM with a tiny model of a kind, which answers a prompt the same way each time."""
    options: dict[str, Any] = {"disable_hybrid_kv_cache_manager": request.param not in STATES}
    if request.param in MULTIMODAL:
        options |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": NO_MEDIA}
    vllm = start(request.param, **options)
    architectures = vllm.core.vllm_config.model_config.hf_config.architectures
    record_property("kind", request.param)
    record_property("architecture", architectures[0])
    record_property("warnings", "; ".join(vllm.side.info().warnings))
    first, *others = (vllm.plain(_text(200, 0)) for _ in range(3))
    if any(other.tokens != first.tokens or other.distance(first) > LIMIT for other in others):
        pytest.skip("this vLLM does not repeat its own answers with this model")
    return vllm


@pytest.mark.parametrize("kind", _params(SHARED), indirect=True)
def test_text_is_shared_as_if_computed(kind: Vllm, copies: Copies, request: pytest.FixtureRequest) -> None:
    """
    Scattered runs, all computed, nothing computed; KV of another text would be noticed. A request that is
    served meanwhile is answered as alone.
    """
    info = kind.side.info()
    assert info.refusals == ()
    assert info.can_move_keys == (request.node.callspec.params["kind"] not in SAME_POSITION)
    tokens = _text(600, 1)
    donor, other = kind.store(tokens), kind.store(_text(600, 2))
    plain = kind.plain(tokens)
    for spans, num_computed in ((SCATTERED, 61), (((597, 598),), 599), (((0, 599),), 1)):
        answer, event = kind.shared(tokens, copies(donor, *spans))
        assert answer.distance(plain) <= LIMIT
        assert (event.decision, event.num_computed) == ("approx", num_computed)
    alone, together = _text(200, 3), kind.ticket(tokens, copies(donor, *SCATTERED))
    unshared, _ = kind.ask(
        (alone, None, kind.fresh("plain")),
        (tokens, together, private_salt(together.ticket_id)),
        max_tokens=MANY,
    )
    assert unshared.distance(kind.plain(alone, max_tokens=MANY)) <= LIMIT
    wrong, _ = kind.shared(tokens, copies(other, *SCATTERED))
    assert _first_differs(wrong, plain) > CLEARLY
    kind.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("kind", UNSHARED, indirect=True)
def test_others_are_served_unshared_and_say_why(kind: Vllm, request: pytest.FixtureRequest) -> None:
    """A ticket is ignored, and nothing is stored."""
    (refusal,) = kind.side.info().refusals
    assert UNSHARED[request.node.callspec.params["kind"]] in refusal
    tokens = _text(300, 1)
    (answer,) = kind.ask((tokens, kind.ticket(tokens), "tenant"))
    assert answer.distance(kind.plain(tokens)) <= LIMIT
    assert kind.events() == ()
