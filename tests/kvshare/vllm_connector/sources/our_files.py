"""Reads what a file of ours uses of vLLM: imports, calls, and attributes of what it annotates as vLLM's."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.kvshare.vllm_connector.sources.vllm_sources import Found, Function, Sources


@dataclass(frozen=True)
class Use:
    """Something of vLLM that a file of ours uses."""

    where: str  # file and line
    module: str
    name: str


class OurFile:
    """What a file of ours imports of vLLM, calls, and reads of objects that it annotates as vLLM's."""

    def __init__(self, path: Path, root: Path) -> None:
        self.name = str(path.relative_to(root))
        self.tree = ast.parse(path.read_text())

    @cached_property
    def imports(self) -> list[tuple[Use, str]]:
        """Each with the name that it has here."""
        uses = []
        for node in ast.walk(self.tree):
            where = f"{self.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module):
                uses += [
                    (Use(where, node.module or "", alias.name), alias.asname or alias.name)
                    for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                uses += [
                    (Use(where, alias.name, ""), alias.asname or alias.name)
                    for alias in node.names
                    if _is_vllm(alias.name)
                ]
        return uses

    def calls(self) -> Iterator[tuple[Use, ast.Call]]:
        """Calls of imported names."""
        known = {here: use for use, here in self.imports if use.name}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                use = known[node.func.id]
                yield Use(f"{self.name}:{node.lineno}", use.module, use.name), node

    def reads(self, sources: Sources) -> Iterator[tuple[str, Found, str]]:
        """(where, vLLM's class, attribute) of parameters annotated as vLLM's, and of what these have."""
        known = {here: use for use, here in self.imports if use.name}

        def annotated(annotation: ast.expr | None) -> Found | None:
            if isinstance(annotation, ast.BinOp):  # X | None
                return annotated(annotation.left)
            use = known.get(annotation.id) if isinstance(annotation, ast.Name) else None
            found = sources.find(use.module, use.name) if use is not None else None
            return found if found is not None and isinstance(found.node, ast.ClassDef) else None

        for function in ast.walk(self.tree):
            if isinstance(function, Function):
                own = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
                types = {each.arg: kind for each in own if (kind := annotated(each.annotation)) is not None}
                for name in _narrowed(function):
                    types.pop(name, None)
                yield from self._reads(sources, function, types)

    def _reads(
        self, sources: Sources, function: Function, types: dict[str, Found]
    ) -> Iterator[tuple[str, Found, str]]:
        def type_of(node: ast.expr) -> Found | None:
            if isinstance(node, ast.Name):
                return types.get(node.id)
            if isinstance(node, ast.Attribute) and (owner := type_of(node.value)) is not None:
                return member_type(sources, owner, node.attr)
            return None

        for node in ast.walk(function):  # a name that stands for a part of one of them
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
                pairs: Sequence[tuple[ast.expr, ast.expr]] = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=True))
                for left, right in pairs:
                    if isinstance(left, ast.Name) and (kind := type_of(right)) is not None:
                        types[left.id] = kind
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (owner := type_of(node.value)) is not None:
                yield f"{self.name}:{node.lineno}", owner, node.attr


def member_type(sources: Sources, owner: Found, name: str) -> Found | None:
    """The vLLM class of a member, as it is annotated."""
    member = sources.members(owner).get(name)
    if member is None:
        return None
    if isinstance(member.node, ast.AnnAssign):
        return sources.class_of(member.module, member.node.annotation)
    if isinstance(member.node, Function):
        return sources.class_of(member.module, member.node.returns)
    return None


def _is_vllm(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "vllm"


def _narrowed(function: Function) -> Iterator[str]:
    """Names whose class is asked with `isinstance`: it is another one then."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            first = node.args[0]
            if isinstance(first, ast.Name):
                yield first.id
