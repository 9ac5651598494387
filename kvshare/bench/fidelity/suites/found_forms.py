"""
Published prompts that have slots: which of them have slots that a value fits into, and filling them in.

Draws a value for a slot by its name. Knows nothing of suites.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from kvshare.bench.fidelity.suites.drawing import fresh
from kvshare.bench.fidelity.suites.library import Library, Source
from kvshare.bench.fidelity.suites.own_forms import Values
from kvshare.replay.workloads import forms, sources

_FIXED = (1400, 4500)  # bytes of a text outside its slots, at least, and with them, at most


def found_forms(library: Library) -> list[Source[str]]:
    """Texts that are neither short nor long, with a slot that a value fits into."""
    shortest, longest = _FIXED
    return [
        source
        for source in library.texts
        if len(source.item.encode()) <= longest
        and forms.is_form(source.item)
        and shortest <= forms.num_fixed(source.item)
        and typed_slots(source.item)
    ]


def typed_slots(form: str) -> list[str]:
    """Names of slots, written ${...} or {{...}}, that ask for a date, number, place, product or person."""
    names = {name for match in forms.SLOT.finditer(form) if (name := match[1] or match[3])}
    return sorted({name.strip() for name in names if _is_typed(name)})


def _is_typed(name: str) -> bool:
    """By its last word: the age of a group is a number, an age group is none."""
    last = re.findall(r"[a-z]+", name.lower())[-1:]
    value = sources.value_for("".join(last), random.Random(0))
    return not any(value.startswith(f"{topic} in ") for topic in sources.TOPICS)


def slot_value(name: str, draw: random.Random, taken: Iterable[str]) -> str:
    """A value that cannot be confused with a taken one."""
    return fresh(lambda: sources.value_for(name, draw), taken)


def filled(form: str, values: Values, choice: str) -> str:
    """The form with these values; other slots get the author's default, their own name, or the choice."""

    def value(match: re.Match[str]) -> str:
        name = forms.slot_name(match)
        if name is None:
            return choice
        if match[4]:
            return match[0]
        return values.get(name) or (match[2] or "").strip() or name.replace("_", " ")

    return forms.SLOT.sub(value, form)
