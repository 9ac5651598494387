"""
Near-duplicate requests, as two users of one service would send them.

The answer to the recipient's question depends on a slot that changed, and differs between the two sheets. So
reusing the donor's KV without recomputing the change gives a wrong answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvshare.demo.questions import KINDS, Kind, Query, answer_to, ask, queries, wording
from kvshare.demo.sheets import (
    MAX_RECORDS,
    Sheet,
    changed_slots,
    edit_sheet,
    make_sheet,
    to_messages,
)

FEWEST_EDITS = 3
MOST_EDITS = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """An earlier request, a nearly equal later one, and the right answer to the later one."""

    donor_messages: list[dict[str, str]]
    recipient_messages: list[dict[str, str]]
    answer: str
    stale_answer: str
    """The answer to the recipient's question on the donor's sheet; it always differs from `answer`."""
    kind: Kind
    num_records: int


def near_duplicate_pairs(seed: int, count: int) -> Iterator[Pair]:
    """
    Pairs with one to four records and three to eight changed slots, with all kinds of questions in turn.

    The same seed gives the same pairs. No text of the training comes from these streams.
    """
    rng = random.Random(f"near-duplicate-pairs-{seed}")
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        fewest_records = 2 if kind == "compare" else 1
        yield _pair(rng, kind, rng.randint(fewest_records, MAX_RECORDS))


def _pair(rng: random.Random, kind: Kind, num_records: int) -> Pair:
    found: list[Query] = []
    while not found:
        donor = make_sheet(rng, num_records=num_records)
        recipient = edit_sheet(rng, donor, num_slots=rng.randint(FEWEST_EDITS, MOST_EDITS))
        found = _distinguishing_queries(donor, recipient, kind)
    query = rng.choice(found)
    return Pair(
        donor_messages=to_messages(donor, ask(rng, donor).text),
        recipient_messages=to_messages(recipient, wording(rng, recipient, query)),
        answer=answer_to(recipient, query),
        stale_answer=answer_to(donor, query),
        kind=kind,
        num_records=num_records,
    )


def _distinguishing_queries(donor: Sheet, recipient: Sheet, kind: Kind) -> list[Query]:
    changed = changed_slots(donor, recipient)
    answerable_before = frozenset(queries(donor, kind))
    return [
        query
        for query in queries(recipient, kind)
        if query in answerable_before
        and query.slots & changed
        and answer_to(donor, query) != answer_to(recipient, query)
    ]
