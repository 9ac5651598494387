"""
Reads vLLM's Python sources, of any version, without importing them.

A name is what a module defines or imports, a member what a class or one of its bases defines or assigns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BUILT_IN = {"object", "ABC", "Generic", "Protocol", "SystemExit", "Enum", "NamedTuple"}


@dataclass(frozen=True)
class Found:
    """A definition, and the module that has it."""

    module: str
    node: ast.AST


class Sources:
    """`root`: the folder that has the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = (path / "__init__.py", path.with_suffix(".py"))
            found = next((file for file in files if file.is_file()), None)
            self._modules[name] = ast.parse(found.read_text()) if found else None
        return self._modules[name]

    def find(self, module: str, name: str) -> Found | None:
        """What a name of a module is, wherever it comes from; a submodule counts."""
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return Found(module, node)
            if name in _assigned(node):
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(self._absolute(module, node), alias.name, node)
        if (lazy := _lazy(tree).get(name)) is not None:
            where, _, real = lazy.partition(":")
            return self.find(module + where, real)
        inner = self.module(f"{module}.{name}")
        return Found(f"{module}.{name}", inner) if inner is not None else None

    def _imported(self, module: str, name: str, node: ast.AST) -> Found | None:
        return self.find(module, name) if module.startswith("vllm") else Found(module, node)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def mro(self, found: Found) -> Iterator[Found]:
        """A class and its bases, as far as they are vLLM's."""
        assert isinstance(found.node, ast.ClassDef), f"{ast.unparse(found.node)[:80]} is no class"
        yield found
        for base in found.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and name.id not in _BUILT_IN:
                parent = self.find(found.module, name.id)
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    yield from self.mro(parent)

    def members(self, found: Found) -> dict[str, Found]:
        """Fields, methods, and what methods assign to `self`, by name; the class's own before its bases'."""
        members: dict[str, Found] = {}
        for each in self.mro(found):
            assert isinstance(each.node, ast.ClassDef)
            for statement in each.node.body:
                names = [statement.name] if isinstance(statement, Function) else _assigned(statement)
                for name in names:
                    members.setdefault(name, Found(each.module, statement))
            for node in ast.walk(each.node):
                for name in _assigned_to_self(node):
                    members.setdefault(name, Found(each.module, node))
        return members

    def class_of(self, module: str, annotation: ast.expr | None) -> Found | None:
        """The vLLM class that an annotation names, `X | None` and quoted included."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.class_of(module, annotation.left) or self.class_of(module, annotation.right)
        if isinstance(annotation, ast.Name):
            found = self.find(module, annotation.id)
            if found is not None and isinstance(found.node, ast.ClassDef):
                return found
        return None

    def signature(self, found: Found) -> Signature:
        """Of a function, of a class's `__init__`, or of a dataclass's fields."""
        if isinstance(found.node, Function):
            return Signature.of(found.node)
        init = self.members(found).get("__init__")
        if init is not None and isinstance(init.node, Function):
            return Signature.of(init.node).without_first
        fields: dict[str, bool] = {}
        for each in reversed(list(self.mro(found))):
            assert isinstance(each.node, ast.ClassDef)
            for node in each.node.body:
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                if "ClassVar" not in ast.unparse(node.annotation):
                    fields[node.target.id] = node.value is None
        return Signature(tuple(fields), frozenset(n for n, needed in fields.items() if needed), False, False)


@dataclass(frozen=True)
class Signature:
    """`names` may be given by name or, but for `only_by_name`, by position; `required` must be given."""

    names: tuple[str, ...]
    required: frozenset[str]
    takes_more: bool  # *args
    takes_any_name: bool  # **kwargs
    only_by_name: frozenset[str] = frozenset()

    @classmethod
    def of(cls, node: Function) -> Signature:
        own = node.args
        places = [*own.posonlyargs, *own.args]
        required = {each.arg for each in places[: len(places) - len(own.defaults)]}
        required |= {each.arg for each, d in zip(own.kwonlyargs, own.kw_defaults, strict=True) if d is None}
        by_name = frozenset(each.arg for each in own.kwonlyargs)
        names = tuple(each.arg for each in [*places, *own.kwonlyargs])
        return cls(names, frozenset(required), own.vararg is not None, own.kwarg is not None, by_name)

    @property
    def without_first(self) -> Signature:
        """As called on an instance."""
        first = self.names[0]
        more, any_name = self.takes_more, self.takes_any_name
        return Signature(self.names[1:], self.required - {first}, more, any_name, self.only_by_name)

    def problem(self, call: ast.Call) -> str | None:
        """Why a call does not fit, or None. Calls with `*` or `**` are taken to bring what is missing."""
        spread = any(isinstance(each, ast.Starred) for each in call.args)
        spread = spread or any(each.arg is None for each in call.keywords)
        by_place = [each for each in call.args if not isinstance(each, ast.Starred)]
        places = [name for name in self.names if name not in self.only_by_name]
        if len(by_place) > len(places) and not self.takes_more:
            return f"takes {len(places)} by position, {len(by_place)} are given"
        named = {each.arg for each in call.keywords if each.arg is not None}
        if not self.takes_any_name and (unknown := named - set(self.names)):
            return f"does not know {', '.join(sorted(unknown))}"
        missing = self.required - named - set(places[: len(by_place)])
        return f"needs {', '.join(sorted(missing))}" if missing and not spread else None

    def problem_of_override(self, ours: Signature) -> str | None:
        """Why `ours` cannot be called as this one, or None."""
        if not ours.takes_more and ours.names[: len(self.names)] != self.names:
            return f"vLLM's takes {self.names}, ours {ours.names}"
        if extra := ours.required - set(self.names):
            return f"ours needs {', '.join(sorted(extra))}, which vLLM does not give"
        if self.takes_any_name and not ours.takes_any_name:
            return "vLLM's takes any name, ours does not"
        return None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module, also under `if` and `try`."""
    for node in getattr(tree, "body", []):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node)
            for part in (*getattr(node, "handlers", []), ast.Module(getattr(node, "orelse", []), [])):
                yield from _statements(part)


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _assigned_to_self(node: ast.AST) -> list[str]:
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = [part for each in node.targets for part in ast.walk(each)]
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [
        each.attr
        for each in targets
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    ]


def _lazy(tree: ast.Module) -> dict[str, str]:
    """`MODULE_ATTRS` of the package vllm: what it imports when asked."""
    for node in _statements(tree):
        if "MODULE_ATTRS" in _assigned(node):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Dict):
                return dict(ast.literal_eval(value))
    return {}


@cache
def text_of(root: Path, folder: str) -> str:
    """All sources of a folder, for what is only written somewhere in them."""
    return "\n".join(file.read_text() for file in sorted((root / folder).rglob("*.py")))
