"""`table`: the same records sorted by another column, some of them new or gone."""

import random
from collections.abc import Sequence

from kvshare.replay.workloads import sources
from kvshare_lab.fidelity.scenario import Draft, Messages, half_of
from kvshare_lab.fidelity.suites.library import TEXTS, Library, in_turn

_ROWS = 12, 26
_COLUMNS = ("date", "name", "product", "place", "units", "price")
_NUMBERS = {"units": (1, 99), "price": (100, 9_999)}  # sorted as numbers

Record = dict[str, str]


def table(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Lines of a table in the order of another column. Label `rows`: `same`, one `new`, or one `gone`.

    The records are drawn, so that there are as many sources as drafts.
    """
    name = next(found for tail in range(64) if half_of(found := f"table:{number}:{tail}") == library.half)
    records = [_record(draw) for _ in range(draw.randint(*_ROWS))]
    by, then = draw.sample(_COLUMNS, 2)
    rows = in_turn(("same", "new", "gone"), number)
    stored = records[:-1] if rows == "new" else records
    now = records[:-1] if rows == "gone" else records
    asks = TEXTS["table"]["asks"]
    return Draft(
        source=name,
        stored=(_prompt(_sorted(stored, by), draw.choice(asks), draw.choice(stored)),),
        prompt=_prompt(_sorted(now, then), draw.choice(asks), draw.choice(now)),
        labels={"rows": rows},
    )


def _record(draw: random.Random) -> Record:
    found = {
        "date": f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
        "name": sources.person(draw),
        "product": draw.choice(sources.PRODUCTS),
        "place": draw.choice(sources.PLACES),
    }
    return found | {name: str(draw.randint(*between)) for name, between in _NUMBERS.items()}


def _sorted(records: Sequence[Record], column: str) -> list[Record]:
    return sorted(records, key=lambda each: each[column].zfill(6) if column in _NUMBERS else each[column])


def _prompt(records: Sequence[Record], ask: str, about: Record) -> Messages:
    lines = [" | ".join(_COLUMNS), *(" | ".join(record[name] for name in _COLUMNS) for record in records)]
    text = TEXTS["table"]["user"].format(table="\n".join(lines), ask=ask.format(**about))
    return ({"role": "system", "content": TEXTS["table"]["system"]}, {"role": "user", "content": text})
