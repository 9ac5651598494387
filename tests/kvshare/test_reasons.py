"""Every reason that the code gives for sharing less is explained, and no other is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare.reasons import REASONS, cache_miss_reason

_ROOT = Path(__file__).parents[2]
_FOLDERS = (
    "kvshare/sharing",
    "kvshare/fleet",
    "kvshare/engines",
    "kvshare/vllm_connector/scheduler",
    "proxy",
)
# Here `NoPlan` stands for what a stored prompt consists of; nobody is given it as a reason.
_NOT_GIVEN = ("memory_keeper.py", "replica_keeper.py")
_CALLS = ("NoPlan", "Unplannable")
_NAMES = ("reason", "refusal", "unshared", "lost", "unplanned")  # variables and fields that hold one
_FUNCTIONS = ("_gate", "_unwanted", "_reason", "why_unshared")  # that return one


def literals(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from literals(value)
    elif isinstance(node, ast.Tuple):
        for value in node.elts:
            yield from literals(value)


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def given_in(tree: ast.AST) -> Iterator[str]:
    """The reasons that the code of a file gives: as arguments, in variables and fields, as results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if name_of(node.func) in _CALLS:
                yield from literals(node.args[0])
            for keyword in node.keywords:
                if keyword.arg in _NAMES:
                    yield from literals(keyword.value)
        elif isinstance(node, ast.Assign):
            targets = [part for t in node.targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
            if any(name_of(target) in _NAMES for target in targets):
                yield from literals(node.value)
        elif isinstance(node, ast.For) and any(is_given(call, node.target) for call in ast.walk(node)):
            yield from literals(node.iter)
        elif isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    yield from literals(inner.value)


def is_given(node: ast.AST, variable: ast.AST) -> bool:
    """Whether a node is a call like `Unplannable(variable)`."""
    is_call = isinstance(node, ast.Call) and name_of(node.func) in _CALLS
    return is_call and name_of(node.args[0]) == name_of(variable) != ""


def given() -> set[str]:
    """By all code that plans requests, relays them, and carries plans out."""
    files = (file for folder in _FOLDERS for file in (_ROOT / folder).rglob("*.py"))
    trees = (ast.parse(file.read_text("utf-8")) for file in files if file.name not in _NOT_GIVEN)
    return {reason for tree in trees for reason in given_in(tree)}


_IN_A_REPLAY_ONLY = {"too_much_relocated"}  # a limit that no server sets


def test_every_reason_that_the_code_gives_is_explained_and_no_other() -> None:
    assert given() - _IN_A_REPLAY_ONLY == set(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_an_explanation_is_a_sentence_or_a_few(reason: str) -> None:
    sentence = REASONS[reason]
    assert sentence[0].isupper() or sentence.startswith("vLLM")
    assert sentence.endswith(".")
    assert "  " not in sentence
    assert cache_miss_reason(reason) == {"type": reason, "message": sentence}


def test_nothing_refused_has_no_reason_and_an_unknown_one_is_passed_on() -> None:
    """A connector of another version may have words of its own."""
    assert cache_miss_reason(None) is None
    unknown = cache_miss_reason("solar_wind")
    assert unknown is not None
    assert unknown["type"] == "solar_wind"
    assert "explanation" in unknown["message"]
