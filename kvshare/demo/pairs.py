"""
Near-duplicate requests as two users of one service would send them.

The recipient's question always turns on a slot that changed, and the donor's sheet would give
another answer to it: reusing the donor's KV without recomputing the change shows as a wrong
answer.
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
    """An earlier request, a nearly equal later one, and the later one's right answer."""

    donor_messages: list[dict[str, str]]
    recipient_messages: list[dict[str, str]]
    answer: str
    stale_answer: str
    """What the donor's values would answer to the recipient's question; never the answer."""
    kind: Kind
    num_records: int


def near_duplicate_pairs(seed: int, count: int) -> Iterator[Pair]:
    """
    Pairs with one to four records and three to eight changed slots, kinds and sizes in turn.

    The same seed gives the same pairs. No training text comes from these streams.
    """
    rng = random.Random(f"near-duplicate-pairs-{seed}")
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        fewest_records = 2 if kind == "compare" else 1
        yield _pair(rng, kind, rng.randint(fewest_records, MAX_RECORDS))


def _pair(rng: random.Random, kind: Kind, num_records: int) -> Pair:
    telling: list[Query] = []
    while not telling:
        donor = make_sheet(rng, num_records=num_records)
        recipient = edit_sheet(rng, donor, num_slots=rng.randint(FEWEST_EDITS, MOST_EDITS))
        telling = _telling_queries(donor, recipient, kind)
    query = rng.choice(telling)
    return Pair(
        donor_messages=to_messages(donor, ask(rng, donor).text),
        recipient_messages=to_messages(recipient, wording(rng, recipient, query)),
        answer=answer_to(recipient, query),
        stale_answer=answer_to(donor, query),
        kind=kind,
        num_records=num_records,
    )


def _telling_queries(donor: Sheet, recipient: Sheet, kind: Kind) -> list[Query]:
    changed = changed_slots(donor, recipient)
    clear_before = frozenset(queries(donor, kind))
    return [
        query
        for query in queries(recipient, kind)
        if query in clear_before
        and query.slots & changed
        and answer_to(donor, query) != answer_to(recipient, query)
    ]
