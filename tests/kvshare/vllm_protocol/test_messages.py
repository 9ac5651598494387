"""The messages between proxy and connector: what is written can be read, and nonsense is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import SegmentId
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import (
    PROTOCOL,
    Dropped,
    FinishedReport,
    Journal,
    StoredSegment,
    Ticket,
    WireCopy,
    WireOrder,
    WireSpan,
    digest_of,
)
from kvshare.vllm_protocol.places import HeldSegments, Moved
from kvshare.vllm_protocol.replica_info import ReplicaInfo
from kvshare.vllm_protocol.salts import private_salt

ids = st.integers(1, 2**63 - 1).map(SegmentId)
numbers = st.integers(0, 10**6)
words = st.text(min_size=1, max_size=20)
some_words = st.dictionaries(words, words, max_size=3)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    """Copies and holes from left to right; those before the end of the exact prefix do not move."""
    position, copies, exact_length = 0, [], 0
    is_exact = draw(st.booleans())
    for _ in range(draw(st.integers(0, 6))):
        position += draw(st.integers(0, 3))
        length = draw(st.integers(1, 5))
        is_exact = is_exact and draw(st.booleans())
        source = position if is_exact else draw(numbers)
        copies.append(WireCopy(draw(ids), draw(numbers), length, position, source))
        position += length
        if is_exact:
            exact_length = position
    return Ticket(
        ticket_id=draw(words),
        namespace=draw(words),
        prompt_digest=draw(words),
        num_tokens=position + draw(st.integers(1, 5)),
        exact_length=exact_length,
        copies=tuple(copies),
        store=draw(st.booleans()),
        from_memory=draw(st.booleans()),
    )


stored = st.builds(StoredSegment, ids, numbers, numbers, numbers)
finished = st.builds(
    FinishedReport,
    ticket_id=words,
    decision=st.sampled_from(["approx", "exact", "full"]),
    reason=st.none() | words,
    used=st.lists(numbers, max_size=4).map(tuple),
    num_computed=numbers,
    num_local=numbers,
    output_ids=st.lists(numbers, max_size=4).map(tuple),
    stored=st.lists(stored, max_size=4).map(tuple),
    repaired=st.lists(st.builds(WireSpan, numbers, numbers), max_size=3).map(tuple),
    stage_seconds=st.dictionaries(words, st.floats(0, 10), max_size=3),
    first_token_s=st.none() | st.floats(0, 10),
)
dropped = st.builds(Dropped, st.lists(ids, max_size=4).map(tuple))
moved = st.builds(Moved, st.lists(ids, max_size=4).map(tuple), st.lists(ids, max_size=4).map(tuple))
journals = st.builds(
    Journal, words, numbers, st.booleans(), st.lists(finished | dropped | moved, max_size=4).map(tuple)
)
infos = st.builds(
    ReplicaInfo,
    epoch=words,
    model=words,
    versions=some_words,
    refusals=st.lists(words, max_size=2).map(tuple),
    warnings=st.lists(words, max_size=2).map(tuple),
    can_move_keys=st.booleans(),
    namespace_fields=some_words,
    bytes_per_token=numbers,
    max_bytes=numbers,
    num_bytes=numbers,
    num_segments=numbers,
    max_model_len=numbers,
    settings=st.dictionaries(words, st.integers(), max_size=2),
)


EVENT = FinishedReport("r", "full", None).to_json()


def sent(value: Any) -> Any:
    """As it comes out of the wire."""
    return json.loads(json.dumps(value.to_json()))


@settings(deadline=None)
@given(tickets())
def test_a_ticket_is_read_as_it_was_written(ticket: Ticket) -> None:
    """Every field survives, big segment ids too, under its own name."""
    document = sent(ticket)
    assert Ticket.from_json(document) == ticket
    assert (document["ticket_id"], document["store"]) == (ticket.ticket_id, ticket.store)


@settings(deadline=None)
@given(journals)
def test_a_journal_is_read_as_it_was_written(journal: Journal) -> None:
    """Both kinds of event."""
    assert Journal.from_json(sent(journal)) == journal


@settings(deadline=None)
@given(infos)
def test_an_info_is_read_as_it_was_written(info: ReplicaInfo) -> None:
    """With its settings and refusals."""
    assert ReplicaInfo.from_json(sent(info)) == info


@settings(deadline=None)  # the first draw compiles
@given(tickets(), st.data())
def test_a_ticket_without_a_field_names_it(ticket: Ticket, data: st.DataObject) -> None:
    """Whatever is missing or of another type is told by name."""
    document = sent(ticket)
    name = data.draw(st.sampled_from(sorted(document)))
    wrongs: list[object] = [
        None,
        {},
        -1,
        [[1, 2]],
        "" if name in ("protocol", "store", "from_memory") else True,
    ]
    for wrong in wrongs:
        if (name, wrong) == ("order", None):
            continue  # there is nothing to choose
        with pytest.raises(WireError, match=name):
            Ticket.from_json({**document, name: wrong})
    del document[name]
    with pytest.raises(WireError, match=name):
        Ticket.from_json(document)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", ""),
        ("last", "3"),
        ("events", {}),
        ("events", [{"kind": "other"}]),
        ("events", [{"kind": "dropped", "segment_ids": [-1]}]),
        ("events", [{"kind": "dropped", "segment_ids": [True]}]),
        ("events", [{"kind": "finished"}]),
        ("events", [{**EVENT, "stored": [[1, 0, 5]]}]),
        ("events", [{name: value for name, value in EVENT.items() if name != "output_ids"}]),
        ("events", [3]),
    ],
)
def test_a_malformed_journal_is_refused(field: str, value: object) -> None:
    """Nothing of it is believed."""
    document = {"epoch": "e", "last": 1, "gap": False, "events": []}
    with pytest.raises(WireError):
        Journal.from_json({**document, field: value})


def test_an_error_does_not_quote_what_was_sent() -> None:
    """It is logged, and a message may hold tokens of a prompt."""
    document = {"epoch": "e", "last": 1, "gap": False, "events": [{**EVENT, "output_ids": [1, "SECRET"]}]}
    with pytest.raises(WireError) as error:
        Journal.from_json(document)
    assert "output_ids" in str(error.value)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_what_is_no_object_is_refused(document: object) -> None:
    """Of every kind of message."""
    for kind in (Ticket, Journal, ReplicaInfo, HeldSegments):
        with pytest.raises(WireError):
            kind.from_json(document)


@pytest.mark.parametrize(
    "copies",
    [
        (WireCopy(SegmentId(1), 0, 5, 0, 0), WireCopy(SegmentId(2), 0, 5, 4, 4)),  # overlap
        (WireCopy(SegmentId(1), 0, 10, 0, 0),),  # the last token
        (WireCopy(SegmentId(1), 0, 0, 0, 0),),  # empty
        (WireCopy(SegmentId(1), 0, 6, 2, 2),),  # crosses the end of the exact prefix
        (WireCopy(SegmentId(1), 0, 3, 1, 4),),  # an exact one that moves
    ],
)
def test_copies_that_cannot_be_written_are_refused(copies: tuple[WireCopy, ...]) -> None:
    """Before anything is written anywhere."""
    ticket = Ticket("r", "n", "d", num_tokens=10, exact_length=5, copies=copies)
    with pytest.raises(WireError, match="copies"):
        Ticket.from_json(sent(ticket))


def test_a_ticket_of_another_protocol_is_refused() -> None:
    """Both sides are upgraded together, or nothing is shared."""
    document = sent(Ticket("r", "n", "d", 10))
    with pytest.raises(WireError, match=f"protocol: expected {PROTOCOL}, got 1"):
        Ticket.from_json({**document, "protocol": 1})


COPIES = (WireCopy(SegmentId(1), 0, 5, 0, 0), WireCopy(SegmentId(2), 0, 30, 10, 40))  # the second moves
ORDER = WireOrder(stretches=(WireSpan(10, 20), WireSpan(20, 40)), probes=(10, 25), num_tokens=8, end=45)


def test_an_order_is_read_as_it_was_written() -> None:
    ticket = Ticket("r", "n", "d", num_tokens=50, exact_length=5, copies=COPIES, order=ORDER)
    assert Ticket.from_json(sent(ticket)) == ticket
    assert ticket.first_approximate == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"end": 39},  # before the last copy's end
        {"end": 50},  # the last token
        {"stretches": (WireSpan(4, 20),)},  # exact KV needs no repair
        {"stretches": (WireSpan(10, 25), WireSpan(20, 40))},  # overlap
        {"stretches": (WireSpan(10, 10),)},  # empty
        {"stretches": (WireSpan(10, 41),)},  # not copied
        {"probes": (9,)},
        {"probes": (25, 10)},  # not ascending
        {"num_tokens": 31},
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(changes: dict[str, Any]) -> None:
    """Before any KV is written."""
    order = replace(ORDER, **changes)
    ticket = Ticket("r", "n", "d", num_tokens=50, exact_length=5, copies=COPIES, order=order)
    with pytest.raises(WireError, match="order"):
        Ticket.from_json(sent(ticket))


def test_exact_is_what_lies_within_the_exact_prefix() -> None:
    """A ticket without copies is exact: it changes nothing."""
    ticket = Ticket("r", "n", "d", 20, exact_length=5)
    assert ticket.is_exact
    assert replace(ticket, copies=(WireCopy(SegmentId(1), 0, 5, 0, 0),)).is_exact
    assert not replace(ticket, copies=(WireCopy(SegmentId(1), 0, 5, 6, 6),)).is_exact


def test_a_private_salt_is_one_that_vllm_takes() -> None:
    """At most 128 characters, none of those it forbids, and nobody else's."""
    salt = private_salt("a" * 32)
    assert len(salt) <= 128
    assert not set(salt) & set("@/\\\0")
    assert salt != private_salt("b" * 32)


def test_the_digest_is_of_the_tokens() -> None:
    """Lists and arrays alike; order and number count."""
    assert digest_of([1, 2]) != digest_of([2, 1])
    assert digest_of([1]) != digest_of([1, 0])


@pytest.mark.parametrize(
    "document",
    [
        {"epoch": "", "last": 0, "segment_ids": []},
        {"epoch": "e", "last": -1, "segment_ids": []},
        {"epoch": "e", "last": 0, "segment_ids": [0]},
        {"epoch": "e", "last": 0, "segment_ids": [1.5]},
    ],
)
def test_held_segments_are_checked(document: object) -> None:
    """They decide what is thrown away."""
    with pytest.raises(WireError):
        HeldSegments.from_json(document)
