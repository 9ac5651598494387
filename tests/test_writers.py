"""docs/architecture.md says who writes each field of the objects that accompany a request."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare.fleet.routed_request import Execution, Incoming, RequestProgress, Routed, RoutedRequest
from kvshare.requests import StoredPrompt
from proxy.request_record import AdmissionRecord, AnswerRecord, BodyRecord, PreparationRecord, RequestRecord

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)`(, frozen)? \| (.+?) \| (.+?) \| .+ \|$", re.MULTILINE)
ROWS = ROW.findall(TEXT.split("## Who writes what of a request\n")[1].split("\n## ")[0])
FROZEN = {RequestRecord, Incoming, Routed}
MUTABLE = {
    *(AdmissionRecord, BodyRecord, PreparationRecord, AnswerRecord),
    *(RoutedRequest, RequestProgress, Execution, StoredPrompt),
}
CHANGING = {"add", "append", "clear", "discard", "extend", "pop", "remove", "set", "setdefault", "update"}
MODULES = [
    path
    for room in ("kvshare", "proxy")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "vllm_connector" not in path.parts  # runs in vLLM, and never sees these objects
]

Writers = dict[str, set[str]]


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([\w/.]+)`", cell))


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions whose values a statement or call replaces or changes."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield node
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        yield node.func.value


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def field_writers(source: str) -> set[str]:
    """The attributes, except those of `self`, that a module's code writes."""
    targets = (target for node in ast.walk(ast.parse(source)) for target in changed(node))
    return {target.attr for target in targets if isinstance(target, ast.Attribute) and not is_of_self(target)}


def makers(source: str) -> set[str]:
    """The classes that a module's code calls by name."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in MODULES}


def test_every_field_has_the_writers_that_the_table_names(sources: dict[str, str]) -> None:
    """A field that the table does not name is set once, when its object is made."""
    stated: Writers = defaultdict(set)
    for _, frozen, fields, writers in ROWS:
        if not frozen:
            for field in named(fields):
                stated[field] |= named(writers)
    actual: Writers = defaultdict(set)
    fields_of_requests = {field.name for one in MUTABLE for field in dataclasses.fields(one)}
    for path, source in sources.items():
        for field in field_writers(source) & fields_of_requests:
            actual[field].add(path)
    assert actual == stated


def test_what_is_frozen_is_made_where_the_table_says(sources: dict[str, str]) -> None:
    """Nothing else calls these classes."""
    stated = {name: named(writers) for name, frozen, _, writers in ROWS if frozen}
    made = {one: {path for path, source in sources.items() if one in makers(source)} for one in stated}
    assert made == stated
    assert stated.keys() == {one.__name__ for one in FROZEN}
    assert all(vars(one)["__dataclass_params__"].frozen for one in FROZEN)


def test_every_row_names_fields_of_its_object() -> None:
    """Each field is in one row, and an engine's server has one writer for it."""
    fields = {one.__name__: {field.name for field in dataclasses.fields(one)} for one in MUTABLE}
    rows = [
        (name, field, named(writers))
        for name, frozen, cell, writers in ROWS
        if not frozen
        for field in named(cell)
    ]
    assert {name for name, _, _ in rows} == fields.keys()
    assert [(name, field) for name, field, _ in rows if field not in fields[name]] == []
    assert len({(name, field) for name, field, _ in rows}) == len(rows)
    for _, field, writers in rows:
        embedded = {path for path in writers if path.startswith(("proxy/generate/", "kvshare/embedded/"))}
        assert len(embedded) <= 1, field
        assert len(writers - embedded) <= 1, field
