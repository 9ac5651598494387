"""
Resolves references in a JSON schema. They are URIs: an `$id` gives a schema an address of
its own, which is the base of all addresses inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

KEYWORDS = ("$ref", "$dynamicRef")
DOCUMENT = "http://document/"  # what a schema without `$id` counts as; llguidance calls it json-schema:///
_ANCHORS = ("$anchor", "$dynamicAnchor")
NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))  # what is in them is not a schema


class _NoTargetError(LookupError):
    """A reference points to nothing in this document, or its address is written in a way that is not read."""


class References:
    """The references of one document, which must not change meanwhile."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._bases: dict[int, str] = {}  # by the id of each object
        self._targets: dict[int, list[Any]] = {}
        self._addressed: dict[str, Any] = {DOCUMENT: root}
        self._id_keyword = "id" if "draft-04" in str(root.get("$schema")) else "$id"
        self._find_addresses(root)

    def targets(self, schema: Mapping[str, Any]) -> Sequence[Any]:
        """Return what the references of this object point to in this document; it may be any value."""
        if id(schema) not in self._targets:
            base = self._bases.get(id(schema), DOCUMENT)
            targets = self._targets[id(schema)] = []
            for reference in (schema.get(keyword) for keyword in KEYWORDS):
                if isinstance(reference, str):
                    with suppress(_NoTargetError):
                        targets.append(self._target(reference, base))
        return self._targets[id(schema)]

    def _find_addresses(self, root: Mapping[str, Any]) -> None:
        waiting: list[tuple[Any, str, bool]] = [(root, DOCUMENT, True)]
        while waiting:
            part, base, has_schemas = waiting.pop()
            if isinstance(part, dict):
                schema_id = part.get(self._id_keyword)
                if has_schemas and isinstance(schema_id, str):
                    base = resolved(schema_id, base).partition("#")[0]
                    self._addressed.setdefault(resolved(schema_id, base).removesuffix("#"), part)
                for keyword in _ANCHORS:
                    if has_schemas and isinstance(part.get(keyword), str):
                        self._addressed.setdefault(f"{base}#{part[keyword]}", part)
                self._bases[id(part)] = base
                waiting += [
                    (value, base, has_schemas and name not in NO_SCHEMAS) for name, value in part.items()
                ]
            elif isinstance(part, list):
                waiting += [(value, base, has_schemas) for value in part]

    def _target(self, reference: str, base: str) -> Any:
        address = resolved(reference, base).removesuffix("#")
        if address in self._addressed:
            return self._addressed[address]
        document, _, fragment = address.partition("#")
        if document not in self._addressed or not fragment.startswith("/"):
            raise _NoTargetError(reference)
        target = self._addressed[document]
        for part in unquote(fragment).split("/")[1:]:
            target = _member(target, part.replace("~1", "/").replace("~0", "~"))
        return target


def resolved(reference: str, base: str) -> str:
    """Return the whole address, with the name of the host in small letters."""
    try:
        if reference.startswith("#"):  # Python joins it to addresses of known schemes only
            return base.partition("#")[0] + reference
        parts = urlsplit(urljoin(base, reference.replace("json-schema:///", DOCUMENT)))
        return parts._replace(netloc=parts.netloc.lower()).geturl()
    except ValueError:  # not a URI
        return reference


def _member(value: object, name: str) -> Any:
    """Raises _NoTargetError."""
    if isinstance(value, Mapping) and name in value:
        return value[name]
    if isinstance(value, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(value):
        return value[int(name[:9])]
    raise _NoTargetError(name)
