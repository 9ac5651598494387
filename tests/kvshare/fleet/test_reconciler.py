"""From what journals report to tree, index, costs and counts; and what replicas are told to drop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.fleet.reconciler import Reconciler
from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.telemetry import Component, FallbackReason, TicketEvent
from kvshare.vllm_protocol.messages import FinishedReport, JournalEvent, Prefilled, StoredSegment, Ticket
from tests.fake_connector import BYTES_PER_TOKEN
from tests.fake_vllm import Behaviour, FakeVllm, Seen, running_vllm
from tests.kvshare.fleet.served_fleet import FORM, ServedFleet, eventually, serving


def reconciler_of(fleet: ServedFleet) -> Reconciler:
    return fleet.engine.server.reconciler


class TestReports:
    """What a replica says of a request."""

    async def test_a_prompt_is_a_donor_before_its_answer_ends(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """Then its answer is added to the same node."""
        vllm.release.clear()
        asking = asyncio.create_task(fleet.report("Rome"))
        await eventually(lambda: len(fleet.nodes) == 1)
        (prompt,) = fleet.nodes
        vllm.release.set()
        request = await asking
        (whole,) = fleet.nodes
        assert (whole.node_id, whole.num_tokens) == (prompt.node_id, prompt.num_tokens + len("the answer"))
        assert request.execution.stored.node == whole.node_id
        assert request.execution.stored.is_settled
        assert request.execution.finished is not None
        assert not request.execution.finished.stored
        assert not request.execution.finished.output_ids

    async def test_what_was_stored_before_is_named_again(self, fleet: ServedFleet) -> None:
        """The same prompt with the same answer is one node."""
        first, second = [await fleet.report("Rome") for _ in range(2)]
        assert len(fleet.nodes) == 1
        assert first.execution.stored.node == second.execution.stored.node == fleet.nodes[0].node_id

    async def test_a_donor_that_is_gone_over_there_leaves_the_tree(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """The connector evicts as it sees fit, and tells; the next prompt is planned without it."""
        await fleet.report("Rome")
        vllm.evict(*vllm.segments)
        await eventually(lambda: not fleet.nodes)
        await fleet.report("Oslo")
        assert vllm.tickets[-1].copies == ()
        assert len(fleet.nodes) == 1

    async def test_a_plan_that_came_too_late_is_counted_and_kept_as_it_was_done(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """The segments went before the request got there: computed in full, and a donor of its own."""
        await fleet.report("Rome")
        vllm.segments.clear()  # in silence
        await fleet.report("Oslo")
        assert vllm.tickets[-1].copies
        assert fleet.counts.executions[Decision.APPROX, Decision.FULL, None] == 1
        newest = fleet.nodes[-1]
        assert newest.pieces.segment_ids == vllm.segments.keys()
        assert newest.exact_length == newest.num_tokens

    @pytest.mark.parametrize("prefills", [True, False])
    async def test_a_report_that_cannot_be_true_is_refused(
        self, fleet: ServedFleet, vllm: FakeVllm, *, prefills: bool
    ) -> None:
        """Segments that leave a hole are dropped over there, and nothing becomes a node."""
        vllm.behaviour.prefills = prefills
        original = vllm._store

        def with_a_hole(ticket: Ticket, tokens: list[int], span: Span) -> StoredSegment:
            stored = original(ticket, tokens, span)
            return stored._replace(start=stored.start + 1)

        vllm._store = with_a_hole  # type: ignore[method-assign]  # the fake's own
        await fleet.report("Rome")
        await eventually(lambda: not vllm.segments)
        assert fleet.nodes == ()
        assert fleet.counts.fallbacks[Component.STORE, FallbackReason.REFUSED] == (2 if prefills else 1)

    async def test_a_prompt_that_vllm_tokenizes_otherwise_is_not_kept(
        self, fleet: ServedFleet, vllm: FakeVllm, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The ticket's digest does not fit: computed as ever, counted and logged."""
        caplog.set_level("INFO", "kvshare.fleet")
        original = vllm.tokens_of
        vllm.tokens_of = lambda body: [1, *original(body)]  # type: ignore[method-assign]  # the fake's own
        await fleet.report("Rome")
        assert fleet.counts.executions[Decision.FULL, Decision.FULL, Reason.PROMPT_MISMATCH] == 1
        assert "planned full, carried out as full" in caplog.text
        assert "prompt_mismatch" in caplog.text
        assert FORM[:20] not in caplog.text
        assert fleet.nodes == ()

    async def test_further_reports_of_a_ticket_are_of_segments_that_nobody_knows(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """As of several choices: they are dropped, and counted."""
        vllm.behaviour.prefills = False
        original = vllm._end

        def twice(seen: Seen, answer: str) -> None:
            original(seen, answer)
            original(seen, answer)

        vllm._end = twice  # type: ignore[method-assign]  # the fake's own
        await fleet.report("Rome")
        await eventually(lambda: len(vllm.segments) == 1)
        (node,) = fleet.nodes
        assert node.pieces.segment_ids == vllm.segments.keys()
        assert fleet.counts.tickets[TicketEvent.UNKNOWN] == 1

    async def test_another_replicas_word_of_a_ticket_is_none(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """A ticket is known to one only; whatever another one says it has kept, it drops."""
        segment = StoredSegment(SegmentId(77), 0, 10, 640)
        vllm.segments[SegmentId(77)] = ("n", (1,) * 10)
        vllm._tell(Prefilled("guessed", (), (segment,)))
        vllm._tell(FinishedReport("guessed", "full", None, stored=(segment,)))
        await eventually(lambda: not vllm.segments)
        assert fleet.nodes == ()
        assert vllm.dropped == [77]

    async def test_a_ticket_without_news_expires(self, tmp_path: Path) -> None:
        """vLLM never admitted the request; what was remembered of it is released."""
        async with (
            running_vllm(Behaviour(silent=True)) as vllm,
            serving(tmp_path, vllm, vllm__ticket_expiry_s=0.05, vllm__journal_wait_s=0.05) as fleet,
        ):
            request = await fleet.send(FORM)
            assert fleet.engine.status().num_pending_tickets == 1
            await eventually(lambda: fleet.engine.status().num_pending_tickets == 0)
            assert fleet.counts.tickets[TicketEvent.EXPIRED] == 1
            assert request.execution.stored.is_settled
            assert request.execution.stored.node is None

    @pytest.mark.parametrize("method", ["store_prompt", "store"])
    async def test_a_store_that_fails_waits_for_no_prompt(
        self, vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """Even where writing raises what it never should, nobody waits for the prompt."""
        short: dict[str, Any] = {"vllm__ticket_expiry_s": 0.2, "vllm__journal_wait_s": 0.05}

        def fail(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        async with serving(tmp_path, vllm, **short) as fleet:
            with monkeypatch.context() as patch:
                patch.setattr(fleet.engine.server.runtime.keeper, method, fail)
                await fleet.report("Rome")
            await eventually(lambda: fleet.replica.shares)  # the journal is read again
            assert len(fleet.engine.server.in_flight.arrivals) == 0
            assert (await fleet.report("Oslo")).execution.stored.node is not None

    async def test_a_prompt_without_a_node_is_waited_for_no_longer(
        self, fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While its answer is still generated: similar prompts are computed in full."""
        monkeypatch.setattr(fleet.engine.server.runtime.keeper, "store_prompt", lambda *_: None)
        arrivals = fleet.engine.server.in_flight.arrivals
        vllm.release.clear()
        asking = asyncio.create_task(fleet.report("Rome"))
        await eventually(lambda: len(vllm.generated) == 1)
        await eventually(lambda: len(arrivals) == 0)
        assert not asking.done()
        vllm.release.set()
        await asking


class TestCosts:
    """What reports teach."""

    async def test_rates_are_learned_from_what_happened(self, fleet: ServedFleet) -> None:
        """Loads by the stages of the journal."""
        await fleet.report("Rome")
        before = fleet.engine.sharing.cost.rates.loads
        await fleet.report("Oslo")
        assert fleet.engine.sharing.cost.rates.loads != before

    async def test_tokens_that_vllm_had_itself_are_no_load(
        self, fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or the load bandwidth would be learned too high from copies that were not made."""
        await fleet.report("Rome")
        loaded: list[int] = []
        cost = fleet.engine.sharing.cost
        monkeypatch.setattr(cost, "observe_load", lambda num_bytes, _: loaded.append(num_bytes))
        original = vllm._tell

        def with_local_tokens(event: JournalEvent) -> None:
            original(replace(event, num_local=12) if isinstance(event, FinishedReport) else event)

        vllm._tell = with_local_tokens  # type: ignore[method-assign]  # the fake's own
        await fleet.report("Reykjavik")
        first, *others = (copy.target for copy in vllm.tickets[-1].copies)
        num_loaded = max(0, first.end - max(12, first.start)) + sum(map(len, others))
        assert loaded[-1] == num_loaded * cost.rates.bytes_per_token

    async def test_steps_of_answers_are_counted_by_what_was_carried_out(self, tmp_path: Path) -> None:
        async with (
            running_vllm(Behaviour(speculation="ngram")) as vllm,
            serving(tmp_path, vllm) as fleet,
        ):
            await fleet.report("Rome")
            assert fleet.counts.answer_steps == {Decision.FULL: 2}
            await fleet.report("Oslo")
            assert fleet.counts.answer_steps == {Decision.FULL: 2, Decision.APPROX: 2}

    @pytest.mark.parametrize(
        "behaviour", [{"speculation": "eagle3", "passing": "no"}, {"refusals": ("sliding windows",)}]
    )
    async def test_one_that_shares_nothing_limits_no_other(self, behaviour: dict[str, object]) -> None:
        """It knows neither the model's KV nor whether keys can be moved, whichever is connected last."""
        async with (
            running_vllm() as sharing,
            running_vllm(Behaviour(**behaviour)) as passing,  # type: ignore[arg-type]
            serving(None, passing, sharing, wait=False) as fleet,
        ):
            await eventually(lambda: all(each.is_connected for each in fleet.replicas))
            limits = fleet.engine.sharing.limits
            assert (limits.can_move_keys, limits.can_probe) == (True, True)
            assert fleet.engine.sharing.cost.rates.bytes_per_token == BYTES_PER_TOKEN

    @pytest.mark.parametrize(
        ("ability", "limit"), [("can_move_keys", "can_move_keys"), ("can_choose", "can_probe")]
    )
    async def test_a_plan_is_what_each_of_those_that_share_can_carry_out(
        self, fleet: ServedFleet, ability: str, limit: str
    ) -> None:
        """One that cannot makes plans without that for all, until it can, or is gone."""
        reconciler, replica = reconciler_of(fleet), fleet.replica
        for can in (False, True):
            changed: dict[str, Any] = {ability: can}
            assert replica.info is not None
            replica.info = replace(replica.info, **changed)  # of this vLLM: else it is read again
            await reconciler.resync(replica, [], is_new=False)
            assert getattr(fleet.engine.sharing.limits, limit) is can
