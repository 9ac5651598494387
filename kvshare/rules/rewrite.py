"""
Applies rules to the body of a request: a pure function from one JSON document to another.

A rule acts on whole lines of one text each and never across texts, so never across roles. Its actions:

    pin    replaces what matches by `value`
    move   takes each line with a match out of its place and puts it at the end of the last message of a user
           or a tool
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvshare.rules.texts import BodyShape, Path, end_of, texts_of, with_text
from kvshare.settings import RuleSettings
from kvshare.settings.patterns import MAX_LINE


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The body after the rules (the same object if none changed it), and the names of those that did."""

    body: dict[str, Any]
    rules: tuple[str, ...]


def apply_rules(rules: Sequence[RuleSettings], body: dict[str, Any], shape: BodyShape) -> Rewritten:
    """
    Return the body after each rule, in their order. `body` does not change. Time is linear in the texts.

    `move` does nothing in the prompt of a completion, and where neither a user nor a tool has said anything.
    """
    found = texts_of(body, shape)
    roles = {text.path: text.role for text in found}
    before = {text.path: text.text for text in found}
    end = end_of(body, shape)
    after = dict(before)
    acted: list[str] = []
    for rule in rules:
        paths = [path for path, role in roles.items() if role in rule.roles]
        if rule.action == "pin":
            changed = _pinned(rule, after, paths)
        elif end is not None:
            changed = _moved(rule, after, paths, end.path)
        else:
            continue
        if any(after.get(path, "") != text for path, text in changed.items()):
            acted.append(rule.name)
            after |= changed
    for path, text in after.items():
        if before.get(path) != text:
            new_part = end.new_part if end is not None else None
            body = with_text(body, path, text, new_part=new_part)
    return Rewritten(body, tuple(acted))


def _pinned(rule: RuleSettings, texts: Mapping[Path, str], paths: Sequence[Path]) -> dict[Path, str]:
    """Return the texts that change."""
    changed = {}
    for path in paths:
        lines = texts[path].split("\n")
        matching = _matching(rule, lines)
        for number in matching:
            content, ending = _cut(lines[number])
            lines[number] = re.sub(rule.match, lambda _: rule.value, content) + ending
        if matching:
            changed[path] = "\n".join(lines)
            if rule.first:
                break
    return changed


def _moved(
    rule: RuleSettings, texts: Mapping[Path, str], paths: Sequence[Path], end: Path
) -> dict[Path, str]:
    """Return the texts that change; the one at the `end` gets the lines that the others lose."""
    changed: dict[Path, str] = {}
    moved: list[str] = []
    for path in paths:
        lines = texts[path].split("\n")
        matching = _matching(rule, lines)
        if matching:
            moved += (lines[number] for number in matching)
            gone = set(matching)
            changed[path] = "\n".join(line for number, line in enumerate(lines) if number not in gone)
            if rule.first:
                break
    if moved:
        last = changed.get(end, texts.get(end, ""))
        changed[end] = "\n".join([last, *moved] if last else moved)
    return changed


def _matching(rule: RuleSettings, lines: Sequence[str]) -> list[int]:
    """Return the numbers of the lines that the rule acts on."""
    search = re.compile(rule.match).search
    matching = (
        number for number, line in enumerate(lines) if len(line) <= MAX_LINE and search(_cut(line)[0])
    )
    return list(islice(matching, 1 if rule.first else None))


def _cut(line: str) -> tuple[str, str]:
    r"""Return a line and what is left of its end: "\r" where lines end with "\r\n"."""
    return (line[:-1], "\r") if line.endswith("\r") else (line, "")
