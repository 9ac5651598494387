"""What the memory for segments has room for, and what happens where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_tree import segment_tokens
from kvshare.vllm_protocol.messages import budget_of
from tests.kvshare.vllm_connector.starts import IN_CHUNKS, WITH_LITTLE_ROOM, starts

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

OF_A_PROMPT = starts(max_bytes=1536 * 800)


@OF_A_PROMPT
def test_a_segment_that_leaves_before_it_is_saved(vllm: Vllm, text: Texts) -> None:
    """Two prompts end in one step, the second needs the room of the first: one is told of and held."""
    prompts = [text(500, 60 + number) for number in range(2)]
    tickets = [vllm.ticket(tokens) for tokens in prompts]
    vllm.ask(*((tokens, ticket, "tenant") for tokens, ticket in zip(prompts, tickets, strict=True)))
    events = [vllm.finished(ticket) for ticket in tickets]
    assert sorted(bool(event.stored) for event in events) == [False, True]


@WITH_LITTLE_ROOM
def test_the_store_is_bounded(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Least recently used segments leave; a donor in use stays; the cap holds all along."""
    first = vllm.store(text(500, 30))
    wanted = copies(first, (0, 480))
    for seed in range(8):
        vllm.store(text(500, 31 + seed))
        _, event = vllm.shared(text(500, 30), wanted)
        assert event.used == tuple(range(len(wanted)))
        vllm.check_idle()
    assert len(vllm.dropped()) >= 3
    assert first.stored[0].segment_id in vllm.side.segments


@IN_CHUNKS
def test_segments_are_cut_by_what_the_proxy_lets_it_hold(vllm: Vllm, text: Texts) -> None:
    """As the embedded engine cuts them where the store has as many bytes; the last has what is left over."""
    assert vllm.side.segments.max_bytes == 1536 * 24_000
    stored = vllm.store(text(500, 77)).stored
    lengths = [segment.length for segment in stored if segment.start < 500]
    expected = segment_tokens(budget_of(1536 * 24_000) // 1536)
    assert expected == 41
    assert set(lengths[:-1]) == {expected}
    assert sum(lengths) == 500  # the answer is kept apart
    assert [segment.start for segment in stored if segment.start >= 500] == [500]


@OF_A_PROMPT
def test_a_prompt_larger_than_the_store(vllm: Vllm, text: Texts) -> None:
    """It is served and not kept, and nobody is evicted for it."""
    kept = vllm.store(text(600, 40))
    event = vllm.store(text(900, 41))
    assert (event.reason, event.stored) == ("no_room", ())
    assert kept.stored[0].segment_id in vllm.side.segments


@OF_A_PROMPT
def test_an_answer_that_finds_no_room_leaves_its_prompt(vllm: Vllm, text: Texts) -> None:
    tokens = text(780, 42)
    ticket = vllm.ticket(tokens)
    vllm.ask((tokens, ticket, vllm.fresh("tenant")), max_tokens=40)
    event = vllm.finished(ticket)
    assert event.reason == "no_room"
    assert sum(segment.length for segment in event.stored) == 780
    assert all(segment.segment_id in vllm.side.segments for segment in event.stored)
