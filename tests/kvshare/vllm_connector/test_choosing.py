"""Repairs that are chosen inside vLLM: the embedded engine's positions and KV, counted and stored as such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from delta_tree import Copy, NodeId, Span, gaps
from kvshare.sharing.plan import Plan, RepairOrder
from kvshare.sharing.rates import Estimate
from kvshare.sharing.repair_choice import probes
from kvshare.vllm_protocol.messages import FinishedReport, WireCopy, WireOrder, WireSpan
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import IN_SMALL_STEPS, QWEN3, STEP_TOKENS, USUAL
from tests.kvshare.vllm_connector.worker.small_worker import late_device

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Copies, Texts, Vllm

LIMIT = 1e-4  # log-probability, float32
NUM_REPAIRED = 60
SHIFT = 41


@dataclass(frozen=True)
class Scene:
    """600 tokens that are known, 41 tokens further behind: three copies with gaps, of the last 16 none."""

    tokens: list[int]
    copies: tuple[WireCopy, ...]

    @property
    def order(self) -> WireOrder:
        pieces = [copy.target for copy in self.copies]
        return WireOrder(
            stretches=tuple(WireSpan(piece.start, piece.end) for piece in pieces),
            probes=tuple(probes(pieces, len(self.tokens)).tolist()),
            num_tokens=NUM_REPAIRED,
            end=len(self.tokens) - 16,
        )

    @property
    def plan(self) -> Plan:
        """The same for the embedded engine."""
        placeholders = gaps([copy.target for copy in self.copies], len(self.tokens))
        return Plan(
            num_tokens=len(self.tokens),
            exact_length=0,
            copies=tuple(
                Copy(
                    donor=NodeId(1),
                    segment_id=copy.segment_id,
                    offset=copy.offset,
                    length=copy.length,
                    target_start=copy.target_start,
                    source_position=copy.source_position,
                    donor_start=copy.source_position,
                )
                for copy in self.copies
            ),
            placeholders=placeholders,
            repairs=(),
            generation=1,
            estimate=Estimate(1.0, 0.5),
            order=RepairOrder(
                tuple(entry.span for entry in self.order.stretches), self.order.probes, NUM_REPAIRED
            ),
        )

    def ask(self, vllm: Vllm, **sampling: Any) -> tuple[Answer, FinishedReport]:
        ticket = vllm.ticket(self.tokens, self.copies, order=self.order)
        answer = vllm.ask((self.tokens, ticket, private_salt(ticket.ticket_id)), **sampling)[0]
        return answer, vllm.finished(ticket)


def scene(
    donor: FinishedReport, tokens: Sequence[int], text: Texts, copies: Copies, *, is_brief: bool = False
) -> Scene:
    """`is_brief`: so few placeholders that the first pass ends before the last layer."""
    recipient, first = text(SHIFT, 9) + list(tokens), (0, 120 if is_brief else 100)
    return Scene(recipient, tuple(copies(donor, first, (130, 300), (301, 560), shift=SHIFT)))


def places(spans: Sequence[WireSpan]) -> list[int]:
    return [place for entry in spans for place in range(entry.start, entry.end)]


@pytest.fixture(
    params=[
        pytest.param("llama", marks=USUAL),
        pytest.param("qwen3", marks=QWEN3),
        pytest.param("llama in small steps", marks=IN_SMALL_STEPS),
    ]
)
def architecture(vllm: Vllm, request: pytest.FixtureRequest) -> Vllm:
    name, _, in_steps = request.param.partition(" ")
    assert vllm.model.name == name
    assert vllm.worker._start.step_tokens == (STEP_TOKENS if in_steps else 2048)
    return vllm


@pytest.mark.parametrize("is_brief", [False, True])
def test_it_chooses_and_answers_as_the_embedded_engine(
    architecture: Vllm, text: Texts, copies: Copies, num_brief: Callable[[], int], is_brief: bool
) -> None:
    """
    Two engines that share no attention code: the same positions, the same first token's distribution. Also
    where vLLM's model is left before the last layer.
    """
    import torch

    from kvshare.embedded.decoder import load_network
    from kvshare.embedded.model import EmbeddedModel
    from kvshare.embedded.prefill import Prefill
    from kvshare.kv.attention import PartialPass

    vllm, tokens = architecture, text(600)
    donor = vllm.store(tokens)
    made = scene(donor, tokens, text, copies, is_brief=is_brief)
    answer, event = made.ask(vllm, max_tokens=1, logprobs=20)
    assert (num_brief() > 0) == is_brief

    model = EmbeddedModel(load_network(str(vllm.model), device="cpu"), name="tiny")
    with torch.inference_mode():
        source = model.new_sequence(len(tokens))
        model.compute(PartialPass(source, (Span(0, len(tokens)),)), np.array(tokens, np.int32))
        segments = {
            part.segment_id: source.cut(Span(part.start, min(part.start + part.length, len(tokens))))
            for part in donor.stored
        }
        kv = model.new_sequence(len(made.tokens))
        kv.write_copies(made.plan.copies, segments)
        prefill, logits = Prefill(model.compute, np.array(made.tokens, np.int32), made.plan, kv), None
        while logits is None:
            _, logits = prefill.advance(max_queries=512)
        expected = torch.log_softmax(logits, dim=-1)
    assert isinstance(prefill.plan, Plan)
    assert places(event.repaired) == [p for span in prefill.plan.repairs for p in range(span.start, span.end)]
    assert max(abs(expected[t].item() - value) for t, value in answer.logprobs[0].items()) <= LIMIT


def test_as_many_are_computed_as_the_plan_says(architecture: Vllm, text: Texts, copies: Copies) -> None:
    vllm, tokens = architecture, text(600, 1)
    made = scene(vllm.store(tokens), tokens, text, copies)
    _, event = made.ask(vllm)
    assert (event.decision, event.reason) == ("approx", None)
    assert event.num_computed == made.plan.num_computed
    assert len(places(event.repaired)) == NUM_REPAIRED
    vllm.check_idle()


def test_what_is_retained_is_what_stood_in_the_slots(architecture: Vllm, text: Texts, copies: Copies) -> None:
    """Repairs are stored anew, the rest of the copies is not: asked again from it, the answer is the same."""
    vllm, tokens = architecture, text(600, 2)
    made = scene(vllm.store(tokens), tokens, text, copies)
    answer, event = made.ask(vllm)
    repaired = set(places(event.repaired))
    stored = {place for part in event.stored for place in range(part.start, part.start + part.length)}
    copied = {place for copy in made.copies for place in range(copy.target.start, copy.target.end)}
    assert repaired <= stored
    assert stored.isdisjoint(copied - repaired)
    assert stored | copied >= set(range(len(made.tokens)))

    rows = [WireCopy(part.segment_id, 0, part.length, part.start, part.start) for part in event.stored]
    for copy in made.copies:
        for part in gaps([Span(p, p + 1) for p in sorted(repaired)], len(made.tokens)):
            kept = part.intersection(copy.target)
            if kept:
                ahead = kept.start - copy.target_start
                rows.append(
                    WireCopy(
                        copy.segment_id,
                        copy.offset + ahead,
                        len(kept),
                        kept.start,
                        copy.source_position + ahead,
                    )
                )
    last = len(made.tokens) - 1
    rows = [row if row.target.end <= last else row._replace(length=last - row.target_start) for row in rows]
    again = sorted((row for row in rows if row.target_start < last), key=lambda row: row.target_start)
    repeated, second = vllm.shared(made.tokens, again)
    assert second.num_computed == 1
    assert repeated.distance(answer) <= LIMIT


def test_a_segment_that_is_gone_is_computed_and_the_rest_is_repaired(
    architecture: Vllm, text: Texts, copies: Copies
) -> None:
    """Nothing is chosen where nothing is copied any more."""
    vllm, tokens = architecture, text(600, 3)
    donor = vllm.store(tokens)
    made = scene(donor, tokens, text, copies)
    gone = made.copies[0].segment_id
    vllm.forget_blocks()
    vllm.worker.parts.transfers.drop([gone])
    _, event = made.ask(vllm)
    kept = (copy.target for copy in made.copies if copy.segment_id != gone)
    left = places([WireSpan(target.start, target.end) for target in kept])
    assert set(places(event.repaired)) <= set(left)
    assert event.decision == ("approx" if left else "full")


def test_where_attention_cannot_be_watched_place_decides(
    architecture: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens, at the starts of the pieces."""
    vllm, tokens = architecture, text(600, 4)
    made = scene(vllm.store(tokens), tokens, text, copies)
    monkeypatch.setattr(vllm.worker.parts.placeholders, "_can_listen", False)
    _, event = made.ask(vllm)
    repaired = places(event.repaired)
    assert len(repaired) == NUM_REPAIRED
    starts = [copy.target_start for copy in made.copies]
    assert all(min(abs(place - start) for start in starts) < NUM_REPAIRED for place in repaired)


def test_loads_with_and_without_an_order_share_a_step(
    architecture: Vllm, text: Texts, copies: Copies
) -> None:
    """Two that choose and one that does not, together: each as it is alone."""
    vllm = architecture
    scenes = [scene(vllm.store(text(600, seed)), text(600, seed), text, copies) for seed in (5, 6)]
    alone = [made.ask(vllm) for made in scenes]
    plain = vllm.store(text(500, 7))
    tickets = [vllm.ticket(made.tokens, made.copies, order=made.order) for made in scenes]
    other = vllm.ticket(text(500, 7), copies(plain, (0, 200), (230, 480)))
    requests = [
        (made.tokens, ticket, private_salt(ticket.ticket_id))
        for made, ticket in zip(scenes, tickets, strict=True)
    ]
    answers = vllm.ask(*requests, (text(500, 7), other, private_salt(other.ticket_id)))
    for (expected, event), answer, ticket in zip(alone, answers, tickets, strict=False):
        assert answer.distance(expected) <= LIMIT
        assert vllm.finished(ticket).repaired == event.repaired
    vllm.check_idle()


def test_a_choice_that_is_late_is_the_same(
    architecture: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results reach the host some steps later, as on a GPU: vLLM goes on, also if nothing else runs."""
    vllm, tokens = architecture, text(600, 11)
    made = scene(vllm.store(tokens), tokens, text, copies)
    expected, event = made.ask(vllm)
    device = late_device(arrives=range(60, 10**6))  # is asked 25 times in a step that waits, or fewer
    monkeypatch.setattr(vllm.worker.parts.placeholders, "_device", device)
    answer, late = made.ask(vllm)
    assert device.questions >= 60
    assert late.repaired == event.repaired
    assert answer.distance(expected) <= LIMIT
    vllm.check_idle()


def test_much_behind_the_last_copy_is_left_to_vllm(
    architecture: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load ends at the last copy, and place decides: vLLM's own steps keep to their budget."""
    from kvshare.vllm_connector.scheduler import scheduler

    monkeypatch.setattr(scheduler, "MAX_TAIL_TOKENS", 100)
    vllm, tokens = architecture, text(600, 8)
    donor = vllm.store(tokens)
    recipient = text(SHIFT, 9) + tokens + text(200, 10)
    made = Scene(recipient, tuple(copies(donor, (0, 100), (130, 300), (301, 560), shift=SHIFT)))
    _, event = made.ask(vllm)
    assert (event.decision, event.reason) == ("approx", None)
    assert len(places(event.repaired)) == NUM_REPAIRED
    starts = [copy.target_start for copy in made.copies]
    assert all(min(abs(place - start) for start in starts) < NUM_REPAIRED for place in places(event.repaired))
    vllm.check_idle()
