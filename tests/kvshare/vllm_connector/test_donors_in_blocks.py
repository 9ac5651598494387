"""Copies whose rows still lie in vLLM's own blocks: the answers are those of copies from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import OF_SMALL_BLOCKS, starts

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
PLACES = ("blocks", "host memory", "both")


pytestmark = OF_SMALL_BLOCKS


@pytest.fixture
def small(vllm: Vllm) -> Vllm:
    """Blocks of few tokens, so that segments end near the end of one."""
    assert vllm.scheduler.block_size == 32
    return vllm


class Sources:
    """Which copies of each load came from blocks, and which from host memory, in tokens."""

    def __init__(self, vllm: Vllm, patch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int]] = []
        transfers = vllm.worker.parts.transfers
        begin = transfers.begin_load

        def note(load: Any, *, joins: bool) -> None:
            in_blocks = sum(len(span) for copy, span in load.targets() if copy in load.sources)
            self.found.append((in_blocks, sum(len(span) for _, span in load.targets()) - in_blocks))
            begin(load, joins=joins)

        patch.setattr(transfers, "begin_load", note)


@pytest.fixture
def sources(small: Vllm, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(small, monkeypatch)


def leave(vllm: Vllm, donor: FinishedReport, where: str) -> None:
    """The donor's segments are where a test wants them: some in host memory only."""
    segments = [segment.segment_id for segment in donor.stored]
    gone = {"blocks": [], "host memory": segments, "both": segments[:1]}[where]
    vllm.side.scheduler.donors.forget(gone)


def comes_from(where: str, found: tuple[int, int]) -> bool:
    in_blocks, in_host = found
    return (bool(in_blocks), bool(in_host)) == {
        "blocks": (True, False),
        "host memory": (False, True),
        "both": (True, True),
    }[where]


@pytest.mark.parametrize("where", PLACES)
def test_copies_at_their_position_equal_a_full_prefill(
    small: Vllm, sources: Sources, text: Texts, copies: Copies, where: str
) -> None:
    """Wherever their rows come from."""
    tokens = text(600, 1)
    donor = small.store(tokens, max_tokens=50)
    leave(small, donor, where)
    answer, event = small.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (event.decision, event.used, event.num_computed) == ("approx", (0, 1, 2, 3, 4), 61)
    assert comes_from(where, sources.found[-1])


def test_moved_copies_give_the_same_answer_from_everywhere(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """Keys are rotated on their way from block to block as on the one from host memory."""
    tokens = text(600, 2)
    recipient, answers = text(41, 9) + tokens, []
    donor = small.store(tokens, max_tokens=50)
    for where in PLACES:
        leave(small, donor, where)
        answer, event = small.shared(recipient, copies(donor, (0, 100), (130, 300), (301, 560), shift=41))
        answers.append(answer)
        assert len(event.used) == 4
        assert where == "both" or comes_from(where, sources.found[-1])
    assert max(answer.distance(answers[0]) for answer in answers) <= LIMIT


def test_a_ticket_can_ask_for_host_memory(small: Vllm, sources: Sources, text: Texts, copies: Copies) -> None:
    """As the proxy's own do, which measure what that takes."""
    tokens = text(600, 5)
    donor = small.store(tokens, max_tokens=50)
    ticket = small.ticket(tokens, copies(donor, *SCATTERED), from_memory=True)
    answer = small.ask((tokens, ticket, private_salt(ticket.ticket_id)))[0]
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert comes_from("host memory", sources.found[-1])
    assert small.finished(ticket).num_from_blocks == 0


def test_one_that_still_runs_is_copied_from_its_blocks(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """Its full blocks are not written any more."""
    tokens = text(600, 3)
    ticket = small.ticket(tokens)
    small.begin(tokens, ticket, salt=small.fresh("tenant"), max_tokens=60)
    while (donor := small.prefilled(ticket)) is None:
        small.llm.llm_engine.step()
    planned = small.ticket(tokens, copies(donor, (0, 200), (230, 500)))
    answer = small.ask((tokens, planned, private_salt(planned.ticket_id)))[0]
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert sources.found[-1][0] > 0


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_running_request_copied_is_copied_from_its_blocks(
    small: Vllm, sources: Sources, text: Texts, copies: Copies, ends: bool
) -> None:
    """The donor's own blocks were given away. When the request has ended its blocks are, too."""
    tokens = text(600, 6)
    donor = small.store(tokens, max_tokens=50)
    leave(small, donor, "host memory")
    first = small.ticket(tokens, copies(donor, (0, 310), (340, 590)))
    small.begin(tokens, first, salt=private_salt(first.ticket_id), max_tokens=4 if ends else 60)
    while small.prefilled(first) is None:
        small.llm.llm_engine.step()
    while ends and small.llm.llm_engine.has_unfinished_requests():
        small.llm.llm_engine.step()
    planned = small.ticket(tokens, copies(donor, (0, 300), (350, 590)))
    answer = small.ask((tokens, planned, private_salt(planned.ticket_id)))[0]
    assert answer.distance(small.plain(tokens)) <= LIMIT
    in_blocks, in_host = sources.found[-1]
    assert (in_blocks > 0) is not ends
    assert in_blocks + in_host == 540


def test_blocks_that_are_given_away_between_plan_and_load(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """The rows come from host memory then; where that has none either, they are computed."""
    tokens = text(600, 4)
    donor = small.store(tokens, max_tokens=50)
    plan = copies(donor, *SCATTERED)
    assert small.scheduler.reset_prefix_cache()
    answer, event = small.shared(tokens, plan)
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (len(event.used), comes_from("host memory", sources.found[-1])) == (5, True)
    again = small.store(tokens, max_tokens=50)
    plan = copies(again, *SCATTERED)
    assert small.drop(again) > 0
    answer, event = small.shared(tokens, plan)
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason) == ("full", "segments_gone")


def test_a_load_in_host_memory_that_is_damaged_does_not_matter_to_blocks(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """Nothing of it is read there."""
    import torch

    tokens = text(600, 5)
    donor = small.store(tokens, max_tokens=50)
    store = small.worker.attached.store
    with torch.inference_mode():
        for stored in store.find([segment.segment_id for segment in donor.stored]).values():
            stored.rows.fill_(7.0)
    answer, event = small.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (len(event.used), comes_from("blocks", sources.found[-1])) == (5, True)
    small.drop(donor)
    small.ask((text(50), None, None))  # the next step carries the drops


def test_new_weights_end_what_lies_in_blocks(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """Not a row of the old ones is copied."""
    tokens = text(600, 6)
    donor = small.store(tokens, max_tokens=50)
    plan = copies(donor, *SCATTERED)
    assert small.scheduler.reset_prefix_cache(reset_connector=True)
    num_loads = len(sources.found)
    answer, event = small.shared(tokens, plan)
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, len(sources.found)) == ("full", "segments_gone", num_loads)
    small.ask((text(50), None, None))  # the next step carries the drops


@pytest.mark.long
@starts(block_size=32, enable_prefix_caching=False)
def test_without_prefix_caching_everything_comes_from_host_memory(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not know what lies in its blocks then, and the connector says so."""
    tokens, sources = text(600, 7), Sources(vllm, monkeypatch)
    donor = vllm.store(tokens, max_tokens=50)
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (len(event.used), comes_from("host memory", sources.found[-1])) == (5, True)
    assert vllm.side.info().settings["copies_in_gpu_memory"] is False


def test_what_is_saved_later_is_what_was_left_in_blocks(
    small: Vllm, sources: Sources, text: Texts, copies: Copies
) -> None:
    """Copies from blocks before its save, and from host memory after it, give a full prefill's answer."""
    tokens, waiting = text(600, 7), small.side.scheduler._waiting
    waiting.arrive(["another"])
    donor = small.store(tokens, max_tokens=50)
    stored = {segment.segment_id for segment in donor.stored}
    assert stored.isdisjoint(small.worker.attached.store.ids())
    num_retained = sum(segment.length for segment in donor.stored)
    assert (num_retained % 32, num_retained - len(donor.output_ids)) == (0, 600)
    plan, plain = copies(donor, *SCATTERED), small.plain(tokens)
    for where in ("blocks", "host memory"):
        answer, event = small.shared(tokens, plan)
        assert answer.distance(plain) <= LIMIT
        assert (event.decision, event.num_computed) == ("approx", 61)
        assert comes_from(where, sources.found[-1])
        waiting.end("another")
        small.settle()
        assert stored <= set(small.worker.attached.store.ids())
        small.forget_blocks()


def test_what_left_its_blocks_before_it_was_saved_is_computed(
    small: Vllm, text: Texts, copies: Copies
) -> None:
    """And the proxy is informed that it is gone."""
    tokens, waiting = text(600, 8), small.side.scheduler._waiting
    waiting.arrive(["another"])
    donor = small.store(tokens, max_tokens=50)
    assert small.scheduler.reset_prefix_cache()
    answer, event = small.shared(tokens, copies(donor, *SCATTERED))
    waiting.end("another")
    assert answer.distance(small.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason) == ("full", "segments_gone")
    assert {segment.segment_id for segment in donor.stored} <= small.dropped()
