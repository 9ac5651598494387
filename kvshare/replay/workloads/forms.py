"""`template` and `header`: one text for all users, with other values in its slots or on top of it."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from kvshare.replay.workloads import sources
from kvshare.replay.workloads.sources import WORDS, WorkloadRow, objects, texts

SLOT = re.compile(
    r"\$\{([^{}:]{1,60})(?::([^{}]{0,200}))?\}"  # ${name:default}
    r"|\{\{\s*([^{}]{1,60}?)\s*\}\}"  # {{name}}
    r"|\[([A-Z][A-Za-z0-9 _/'-]{1,40})\]"  # [NAME]
    r"|(– bitte wählen –|(?m:^ ?–$))"  # a choice of a form in German
)
_SHORTEST = 600  # characters, where there are enough that long
_LONGEST = 8000
_USES = 12  # of a form, on average
_LONG = 1500  # characters: a system prompt
_LONGEST_SYSTEM = 8000
_SHORT = 600  # a question
_NUM_SYSTEM_PROMPTS = 3


def template(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """Yield the same forms filled in by many users; some forms are more frequent than others."""
    forms = [text for text in _form_texts(paths) if is_form(text)]
    long = [form for form in forms if num_fixed(form) >= _SHORTEST]
    forms = long if len(long) >= min(4, len(forms)) else forms
    if not forms:
        return
    used = draw.sample(forms, min(len(forms), max(3, num_requests // _USES)))
    weights = [1 / (rank + 1) ** 0.7 for rank in range(len(used))]
    for number in count():
        (form,) = draw.choices(used, weights)
        message = {"role": "user", "content": filled(form, draw)}
        user = f"u{draw.randrange(max(2, num_requests // 3))}"
        yield WorkloadRow(f"template-c{number}", 0, user, (message,))


def is_form(text: str) -> bool:
    """Return whether it has slots before its end: with slots at the end only, a prefix cache is enough."""
    first = SLOT.search(text)
    return first is not None and len(text) <= _LONGEST and num_fixed(text) - first.start() >= len(text) // 5


def num_fixed(form: str) -> int:
    """Characters outside its slots."""
    return len(SLOT.sub("", form))


def slot_name(match: re.Match[str]) -> str | None:
    """Return the name in a match of `SLOT`; None for a choice, which has no name."""
    return next((name.strip() for name in match.group(1, 3, 4) if name), None)


def filled(form: str, draw: random.Random) -> str:
    """Return the form with one value for each slot name; some slots get the author's default."""
    chosen: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name = slot_name(match)
        slot = "choice" if name is None else name
        default = (match.group(2) or "").strip()
        if slot not in chosen:
            keep = default and draw.random() < 0.2
            chosen[slot] = default if keep else sources.value_for(slot, draw)
        return str(draw.choice(WORDS["choices"])) if slot == "choice" else chosen[slot]

    return SLOT.sub(value, form)


def _form_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the texts; a customer's request and its reply with slots become one form for an agent."""
    replies = False
    for row in objects(paths):
        asked, reply = row.get("instruction"), row.get("response")
        if isinstance(asked, str) and isinstance(reply, str):
            replies = True
            yield WORDS["support_form"].format(
                intent=str(row.get("intent") or "other").replace("_", " "), reply=reply
            )
    if not replies:
        yield from texts(paths)


def header(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    Yield one long system prompt for all users, with today's date, the user and the tools on top.

    The system prompts are the longest texts of the sources, the questions the short ones.
    """
    all_texts = texts(paths)
    long = sorted(
        {text for text in all_texts if _LONG <= len(text) <= _LONGEST_SYSTEM},
        key=lambda text: (-len(text), text),
    )
    if not long:
        return
    questions = sorted({text for text in all_texts if len(text) <= _SHORT}) or WORDS["questions"]
    bodies = long[:_NUM_SYSTEM_PROMPTS]
    users = [(f"u{number}", sources.person(draw)) for number in range(max(2, num_requests // 4))]
    for number in count():
        user, name = draw.choice(users)
        system = {"role": "system", "content": _header(name, draw) + draw.choice(bodies)}
        question = {"role": "user", "content": draw.choice(questions)}
        yield WorkloadRow(f"header-c{number}", 0, user, (system, question))


def _header(name: str, draw: random.Random) -> str:
    """Return the text above the shared part, different in each request."""
    tools = [
        json.dumps({"name": name, "description": description})
        for name, description in draw.sample(sorted(WORDS["tools"].items()), draw.randint(2, 6))
    ]
    return (
        f"Current date: {sources.date(draw)}, {sources.clock(draw)}\n"
        f"User: {name}, {draw.choice(sources.PLACES)}\nTools:\n" + "\n".join(tools) + "\n\n"
    )
