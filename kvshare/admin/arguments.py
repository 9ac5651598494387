"""
Arguments of an administrator's questions and commands: checked, and the nodes and namespaces that they name.

Their types are stricter than pydantic's own: an eviction must not guess, and JSON's `true` is not a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from delta_tree import DeltaTree, Node, NodeId
from kvshare.errors import ErrorCode, RequestError
from kvshare.tenants import Tenants

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

KindT = TypeVar("KindT", bound="DataclassInstance")

STRICT = ConfigDict(extra="forbid")  # of each kind: a misspelt `dry_run` must not evict


def _digits(value: object) -> str:
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,16}", str(value)):
        raise PydanticCustomError("no_integer", "expected an integer")
    return str(value)


def _truth(value: object) -> str:
    if (text := str(value).lower()) not in ("true", "false", "1", "0"):
        raise PydanticCustomError("no_truth", "expected true or false")
    return text


Number = Annotated[int, Field(ge=1, le=2**53 - 1), BeforeValidator(_digits)]
Flag = Annotated[bool, BeforeValidator(_truth)]
Digest = Annotated[str, Field(min_length=4)]
"""The digest of a namespace, or its first digits."""
TenantName = Annotated[str, Field(min_length=1)]
NO_TENANTS = Tenants()
"""Of a store whose namespaces' tenants are not known."""


def checked(kind: type[KindT], arguments: Mapping[str, Any]) -> KindT:
    """
    Return a question or command of this kind, from the text of a query string or the values of JSON.

    None is the same as absent.
    Raises:  RequestError that names the argument which is missing, wrong or unknown
    """
    names = [field.name for field in fields(kind)]
    values = {name: value for name, value in arguments.items() if value is not None or name not in names}
    adapter: TypeAdapter[KindT] = _adapter(kind)
    try:
        return adapter.validate_python(values)
    except ValidationError as exc:
        wrong = exc.errors(include_url=False)[0]
        param = str(wrong["loc"][0])
        problem = f"{wrong['msg'].replace('Input should be', 'expected')}, got {wrong['input']!r}"
        if param not in names:
            problem = f"unknown argument; expected one of: {', '.join(names)}"
        elif param not in values:
            problem = "is required"
        raise RequestError(f"{param}: {problem}", param=param) from exc


@cache
def _adapter(kind: type[KindT]) -> TypeAdapter[KindT]:
    return TypeAdapter(kind)


def node_of(tree: DeltaTree, name: str, node_id: int) -> Node:
    node = tree.get(NodeId(node_id))
    if node is None:
        raise not_found(name, node_id)
    return node


def not_found(name: str, node_id: int) -> RequestError:
    message = f"{name}: no node {node_id} is stored; it may have been evicted"
    return RequestError(message, param=name, code=ErrorCode.NODE_NOT_FOUND)


def chosen(
    tree: DeltaTree, tenants: Tenants, *, namespace: str | None, tenant: str | None
) -> frozenset[str] | None:
    """Return the stored namespaces that are named, by digest or as a tenant's; None: none is, so all."""
    if namespace is not None:
        found = frozenset([_namespace_of(tree, namespace)])
        return found if tenant is None else found.intersection(tenants.namespaces_of(tenant))
    if tenant is None:
        return None
    stored = tree.namespaces().intersection(tenants.namespaces_of(tenant))
    if not stored:
        raise RequestError(
            f"tenant: no prompt of a tenant {tenant!r} is stored",
            param="tenant",
            code=ErrorCode.NAMESPACE_NOT_FOUND,
        )
    return stored


def nodes_of(tree: DeltaTree, namespaces: frozenset[str] | None) -> tuple[Node, ...]:
    return tuple(node for node in tree.nodes() if namespaces is None or node.namespace in namespaces)


def _namespace_of(tree: DeltaTree, digits: str) -> str:
    """Return the stored namespace with this digest, or with a digest that begins so."""
    matching = {digest for digest in tree.namespaces() if digest.startswith(digits)}
    if len(matching) != 1:
        raise RequestError(
            f"namespace: expected the digest of one stored namespace, {len(matching)} begin with {digits}",
            param="namespace",
            code=ErrorCode.NAMESPACE_NOT_FOUND,
        )
    (digest,) = matching
    return digest
