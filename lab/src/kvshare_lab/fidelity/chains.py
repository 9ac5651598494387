"""
`kvshare bench fidelity --chains N`: edits of edits at different places of a text, as a server serves them.

A chain is a text that is asked about, edited in a few words, asked about again, and so on. Every turn is
planned, computed and stored by the embedded engine's parts, with the settings of a server, and its donors are
those that the index finds. In some turns the answer is compared with a full prefill's. `fresh`: the same turn
with only the prompt before it as donor, computed in full.
"""

import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from kvshare.conversation.chat import Chat
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.errors import ConfigError
from kvshare.requests import Decision
from kvshare_lab.bench.harness import environment, running_engine
from kvshare_lab.fidelity.measures import rounded
from kvshare_lab.fidelity.scenario import SEED
from kvshare_lab.fidelity.served import Served, full_answer, serve
from kvshare_lab.fidelity.suites.library import Library

_MEASURED = (1, 5, 10, 20, 30, 40)  # turns
_MOST_WORDS = 3  # that an edit replaces
_NUM_SPARE = 12  # passages whose words are written
_SYSTEM = "You answer questions about the text below in one or two sentences."
_QUESTION = "Question: what does the text say about {title}?"
_WORD = re.compile(r"\w+")


class EditedText:
    """A text whose words are replaced by other words of its kind, at places that were not edited before."""

    def __init__(self, texts: Sequence[str], title: str, words: Sequence[str], draw: random.Random) -> None:
        """`words`: what is written instead. Places are words, at least `_MOST_WORDS` apart from the next."""
        self._parts = re.split(r"(\w+)", "\n\n".join(texts))  # words are the odd ones
        self._title, self._draw = title, draw
        self._words = [sorted({word for word in words if _kind(word) == kind}) for kind in range(3)]
        places = range(1, len(self._parts) - 2 * _MOST_WORDS, 2 * _MOST_WORDS)
        self.places = draw.sample(places, len(places))  # in the order of the turns

    def edit(self, place: int) -> None:
        """Replace one to three words from this place on."""
        for at in range(place, place + 2 * self._draw.randint(1, _MOST_WORDS), 2):
            old = self._parts[at]
            others = [word for word in self._words[_kind(old)] if word != old]
            self._parts[at] = self._draw.choice(others)

    @property
    def chat(self) -> Chat:
        text = "".join(self._parts)
        user = f"{text}\n\n{_QUESTION.format(title=self._title)}"
        return Chat(({"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}))


def _kind(word: str) -> int:
    """0: a number, 1: with a capital, 2: another word."""
    return 0 if word.isdigit() else 1 if word[:1].isupper() else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    What chains are made of.

    `edits`: places that one turn edits. `places`: how many places take turns; 0: another one every time.
    """

    turns: int = 40
    places: int = 0
    edits: int = 1
    prompt_tokens: int = 1500
    seed: int = 0
    half: int = 0  # of the source documents


async def measure(
    chains: int, options: Options, *, data: Path | None, overrides: Mapping[str, object]
) -> dict[str, Any]:
    """
    Means over the chains in some of their turns, and all turns of each chain.

    `overrides`: settings, such as the model's path.
    Raises:  ConfigError if there is too little text; ModelError
    """
    library, rows = Library(data, options.half), []
    for number in range(chains):
        draw = random.Random(f"{SEED}:chain:{options.half}:{options.seed}:{number}")
        async with running_engine(overrides={"index.dense": False, **overrides}) as engine:
            text = await _drawn(engine, library, options.prompt_tokens, draw)
            rows.append([row async for row in _turns(engine, text, options)])
    measured = [row["turn"] for row in rows[0] if "fresh" in row]
    by_turn = {str(turn): _means([chain[turn - 1] for chain in rows]) for turn in measured}
    used = fmean(row["used"] for chain in rows for row in chain)
    return {"by_turn": by_turn, "used": rounded(used), "rows": rows, "environment": environment()}


async def _drawn(
    engine: EmbeddedEngine, library: Library, num_tokens: int, draw: random.Random
) -> EditedText:
    """Passages of the library, in an order that is drawn, until the prompt is long enough."""
    passages = draw.sample([source.item for source in library.passages], len(library.passages))
    words = [word for passage in passages[-_NUM_SPARE:] for word in _WORD.findall(passage.text)]
    for end in range(1, len(passages) + 1):
        texts = [f"{passage.title}\n{passage.text}" for passage in passages[:end]]
        text = EditedText(texts, passages[0].title, words, draw)
        if (await engine.encode_chat(text.chat)).num_tokens >= num_tokens:
            return text
    raise ConfigError("--prompt-tokens", f"the texts of this half have fewer than {num_tokens} tokens")


async def _turns(engine: EmbeddedEngine, text: EditedText, options: Options) -> AsyncIterator[dict[str, Any]]:
    """Serve the text, and then every edit of it. Gives a row for each turn."""
    order = cycle(text.places[: options.places or None])
    before = await engine.encode_chat(text.chat)
    await serve(engine, before)
    for turn in range(1, options.turns + 1):
        for place in islice(order, options.edits):
            text.edit(place)
        prompt = await engine.encode_chat(text.chat)
        full = cache(partial(full_answer, engine, prompt)) if turn in _MEASURED else None
        row = _row(turn, await serve(engine, prompt, full=full))
        if full is not None:
            tenant = f"fresh-{turn}"
            await serve(engine, before, tenant=tenant)
            row["fresh"] = _row(turn, await serve(engine, prompt, tenant=tenant, full=full))
        yield row
        before = prompt


def _row(turn: int, served: Served) -> dict[str, Any]:
    """A turn: what was shared, expected and, if it was compared, found. An exact answer does not deviate."""
    report = served.report
    prediction = report.prediction if report.decision is Decision.APPROX else None
    return {
        "turn": turn,
        "tokens": report.num_prompt_tokens,
        "decision": report.decision,
        "reason": report.reason,
        "used": rounded(report.num_cached / report.num_prompt_tokens),
        "repaired": report.num_repaired,
        "donors": len(report.donors),
        "expected": 0.0 if prediction is None else rounded(prediction.expected),
        "inherited": 0.0 if prediction is None else rounded(prediction.inherited),
        "kl": served.measured.get("kl", 0.0),
        "kl_first": served.measured.get("kl_first", 0.0),
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one turn of all chains."""
    names = ("expected", "inherited", "used", "kl", "kl_first")
    return {
        **{name: rounded(fmean(row[name] for row in rows)) for name in names},
        "kl_max": max(row["kl"] for row in rows),
        "approximate": sum(row["decision"] == Decision.APPROX for row in rows),
        "fresh": {name: rounded(fmean(row["fresh"][name] for row in rows)) for name in ("expected", "kl")},
    }
