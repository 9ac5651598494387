"""`sheet`: the forms that the forms model was made for, with other values and another question."""

import random

from kvshare_lab.demo_model.pairs import FEWEST_EDITS, MOST_EDITS, ask
from kvshare_lab.demo_model.sheets import MAX_RECORDS, edit_sheet, make_sheet, to_messages
from kvshare_lab.fidelity.scenario import Draft, half_of
from kvshare_lab.fidelity.suites.library import Library


def sheet(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A form of which a few values changed. Label `records`: how many it has.

    The values are drawn, so that there are as many sources as drafts.
    """
    name = next(found for tail in range(64) if half_of(found := f"sheet:{number}:{tail}") == library.half)
    stored = make_sheet(draw, num_records=draw.randint(1, MAX_RECORDS))
    now = edit_sheet(draw, stored, num_slots=draw.randint(FEWEST_EDITS, MOST_EDITS))
    return Draft(
        source=name,
        stored=(tuple(to_messages(stored, ask(draw, stored).text)),),
        prompt=tuple(to_messages(now, ask(draw, now).text)),
        labels={"records": len(now.records)},
    )
