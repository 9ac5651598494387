"""The session of a coding agent: it does to its prompts what harnesses do, and is measured in every way."""

from __future__ import annotations

import json
import re
from itertools import chain, pairwise
from typing import Any

from kvshare_lab.bench import agents
from kvshare_lab.bench.agents import RULES, session


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    """The text of each block, in order."""
    blocks = [message["content"] for message in messages]
    return [
        block.get("text") or json.dumps(block.get("input") or block.get("content"))
        for each in blocks
        for block in ([{"text": each}] if isinstance(each, str) else each)
    ]


def test_front_changes_with_every_turn_and_the_rules_take_that_out_of_the_way() -> None:
    """Nonce and clock are new each turn; without the lines that rules match all systems are one."""
    systems = [body["system"] for body in session(seed=3)]
    assert len(set(systems)) == len(systems) == 20
    pattern = "|".join(rule["match"] for rule in RULES)
    assert len({re.sub(pattern, "", system) for system in systems}) == 1


def test_only_the_last_turn_has_its_thoughts() -> None:
    for number, body in enumerate(session(seed=3, num_turns=6)):
        thoughts = [place for place, text in enumerate(texts_of(body["messages"])) if "<think>" in text]
        last_answer = len(texts_of(body["messages"])) - 3
        assert thoughts == ([last_answer] if number else [])


def test_results_change_a_little_and_seldom() -> None:
    """Between two turns at most one earlier result has another number, and over a session some have."""
    bodies = list(session(seed=3))
    changes = []
    for before, after in pairwise(bodies):
        old, new = texts_of(before["messages"]), texts_of(after["messages"])
        pairs = [pair for pair in zip(old, new, strict=False) if pair[0].startswith('"#')]
        changes.append([pair for pair in pairs if pair[0] != pair[1]])
    assert max(map(len, changes)) == 1
    assert any(changes)
    for old_result, new_result in chain.from_iterable(changes):
        assert old_result.partition("+ ")[0] == new_result.partition("+ ")[0]


def test_the_same_seed_makes_the_same_session() -> None:
    first, again, other = (list(session(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


async def test_a_session_is_measured_in_every_way() -> None:
    """Of a short one, with the forms model: rules make a prefix of what edits have to copy."""
    document = await agents.run(model="demo", turns=3, guide=2)
    assert document["prompt_tokens"]["first"] < document["prompt_tokens"]["last"]
    for way in ("edits", "rules"):
        assert 0 <= document[way]["reused"] <= 1
        assert len(document[way]["decisions"]) == 3
    assert document["rules"]["equal_prefix"] > document["edits"]["equal_prefix"]
