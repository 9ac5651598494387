"""
Pairs of prompts by rule and seed: one that is stored, and a second that differs by an edit or by its order.

They are made of texts that are in neither half of the fidelity lab: consultations and notes, news, first
questions of chat users. Without a folder of data they are made of the project's samples, which the lab uses
too. The words around the texts are in pair_texts.yaml.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import yaml

from kvshare.errors import ConfigError
from kvshare.logs.requests import Message
from kvshare.replay.workloads import SAMPLES, sources
from kvshare_lab.fidelity.suites.library import shortened

Messages = tuple[Message, ...]
Both = tuple[Messages, Messages]  # the stored prompt, and the one that is asked

REORDERED = ("reordered", "reordered, other question")
_LONGEST, _SHORTEST = 4000, 1200  # characters of a text: 300 to 1,000 tokens of English
_PASSAGE, _NUM_PASSAGES = 600, 5  # characters; a prompt
_OTHER_QUESTION = 4  # one reordered pair in this many has another question as well
_ENGLISH = 0.97  # share of ASCII
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
# Numbers of two digits and more, and names inside sentences.
_VALUE = re.compile(r"(?<![\w.,])\d[\d.,]*\d(?!\w)|(?<=[a-z,] )[A-Z][a-z]{3,}\b")
_WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Pair(NamedTuple):
    """Two prompts as messages; `kind` says what differs."""

    kind: str
    stored: Messages
    asked: Messages


def make_pairs(data: Path | None, *, edits: int, reordered: int, seed: int) -> list[Pair]:
    """
    `edits` pairs that differ by an edit, of each kind in turn, and `reordered` pairs whose passages are in
    another order. Each text is used once. Raises ConfigError where there are too few.
    """
    draw = random.Random(f"pairs:{seed}")
    texts, passages = _texts(data), _passages(data)
    draw.shuffle(texts)
    draw.shuffle(passages)
    pairs = [*islice(_edited(texts, draw), edits), *islice(_reordered(passages, draw), reordered)]
    if len(pairs) < edits + reordered:
        source = "the folder" if data is not None else "the project's own samples"
        problem = f"the texts of {source} suffice for {len(pairs)} pairs; expected {edits} + {reordered}"
        raise ConfigError("--data", problem)
    return pairs


def _edited(texts: list[str], draw: random.Random) -> Iterator[Pair]:
    """For each kind in turn the first text that can be edited so, until no kind fits any text."""
    kinds = dict(_EDITS)
    while kinds:
        for kind, edit in list(kinds.items()):
            for index, text in enumerate(texts):
                if (both := edit(text, draw)) is not None:
                    del texts[index]
                    yield Pair(kind, *both)
                    break
            else:
                del kinds[kind]


def _values(text: str, draw: random.Random) -> Both | None:
    """One to three numbers or names are replaced."""
    found = list(_VALUE.finditer(text))
    if len(found) < 3:
        return None
    chosen = sorted(draw.sample(found, draw.randint(1, 3)), key=re.Match.start, reverse=True)
    new = text
    for match in chosen:
        new = new[: match.start()] + _other_value(match[0], draw) + new[match.end() :]
    return _both(text, new, draw)


def _other_value(value: str, draw: random.Random) -> str:
    if value[0].isdigit():
        first = draw.choice([digit for digit in "123456789" if digit != value[0]])
        digits = first + "".join(draw.choice("0123456789") for _ in value[1:])
        return "".join(new if old.isdigit() else old for new, old in zip(digits, value, strict=True))
    return draw.choice([place for place in sources.PLACES if place != value])


def _header(text: str, draw: random.Random) -> Both:
    """Date and user, which stand in front of everything, are replaced."""
    heads = [_WORDS["header"].format(date=sources.date(draw), person=sources.person(draw)) for _ in range(2)]
    question = f"{text}\n\n{draw.choice(_WORDS['ask'])}"
    stored, asked = (
        ({"role": "system", "content": head}, {"role": "user", "content": question}) for head in heads
    )
    return stored, asked


def _dropped(text: str, draw: random.Random) -> Both | None:
    sentences = _SENTENCE.split(text)
    if len(sentences) < 5:
        return None
    gone = draw.randrange(1, len(sentences) - 1)
    return _both(" ".join(sentences), " ".join(sentences[:gone] + sentences[gone + 1 :]), draw)


def _dialogue(text: str, draw: random.Random) -> Both | None:
    """The two oldest turns of a chat are dropped."""
    sentences = _SENTENCE.split(text)
    if len(sentences) < 12:
        return None
    size = len(sentences) // 6
    parts = [" ".join(sentences[start : start + size]) for start in range(0, 6 * size, size)]
    roles = ("user", "assistant") * 3
    chat = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
    system = {"role": "system", "content": _WORDS["chat"]}
    question = {"role": "user", "content": draw.choice(_WORDS["ask"])}
    return (system, *chat, question), (system, *chat[2:], question)


_EDITS: Mapping[str, Callable[[str, random.Random], Both | None]] = {
    "values": _values,
    "header": _header,
    "sentence dropped": _dropped,
    "sentence inserted": lambda text, draw: (both := _dropped(text, draw)) and both[::-1],
    "oldest turns dropped": _dialogue,
}


def _both(text: str, other: str, draw: random.Random) -> Both:
    ask = draw.choice(_WORDS["ask"])
    stored, asked = (({"role": "user", "content": f"{each}\n\n{ask}"},) for each in (text, other))
    return stored, asked


def _reordered(passages: list[str], draw: random.Random) -> Iterator[Pair]:
    """Passages in another order; in one pair of every `_OTHER_QUESTION` the question differs, too."""
    for number in range(len(passages) // _NUM_PASSAGES):
        found = passages[number * _NUM_PASSAGES : (number + 1) * _NUM_PASSAGES]
        order = found[:]
        while order == found:
            draw.shuffle(order)
        other = number % _OTHER_QUESTION == _OTHER_QUESTION - 1
        first = draw.choice(found)
        second = draw.choice([text for text in found if text != first]) if other else first
        yield Pair(REORDERED[other], _documents(found, first), _documents(order, second))


def _documents(passages: Sequence[str], meant: str) -> Messages:
    """Passages, and a question that one of them answers: what follows its first words."""
    shown = "\n\n".join(f"Document:\n{passage}" for passage in passages)
    ask = _WORDS["question"].format(start=" ".join(meant.split()[:6]))
    system = {"role": "system", "content": _WORDS["documents"]}
    return system, {"role": "user", "content": f"{shown}\n\n{ask}"}


def _texts(data: Path | None) -> list[str]:
    if data is None:
        found = sources.texts([SAMPLES / "templates.jsonl"])
    else:
        notes = [data / "medical_notes" / f"{name}.jsonl.gz" for name in ("aci_bench", "mts_dialog")]
        found = sources.texts([*notes, data / "wildchat_user_4k" / "wildchat_user.jsonl.gz"])
    english = (text for text in found if sum(map(str.isascii, text)) >= _ENGLISH * len(text))
    fitting = (shortened(text, _LONGEST) for text in english)
    return list(dict.fromkeys(text for text in fitting if len(text) >= _SHORTEST))


def _passages(data: Path | None) -> list[str]:
    if data is not None:
        found = list(_news(data / "wmt19"))
    else:
        bare = sources.bare_passages([SAMPLES / "tool_results.jsonl"])
        questions = sources.questions([SAMPLES / "questions.jsonl"])
        found = [passage.text for passage in chain(bare, *(each.passages for each in questions))]
    return list(dict.fromkeys(shortened(text, _PASSAGE) for text in found))


def _news(folder: Path) -> Iterator[str]:
    """Passages of WMT19's English news: consecutive lines, as articles are not marked."""
    for name, side in (("de-en", "ref"), ("zh-en", "ref"), ("en-de", "src")):
        passage = ""
        for row in sources.objects([folder / f"newstest2019.{name}.jsonl.gz"]):
            passage = f"{passage} {row[side]}".strip()
            if len(passage) >= _PASSAGE:
                yield passage
                passage = ""
