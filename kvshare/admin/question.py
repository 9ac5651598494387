"""
What a question to the store is: a function over a `DeltaTree` with checked arguments, and its answer.

Also finds what arguments name: nodes and namespaces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import getfullargspec
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from delta_tree import DeltaTree, Node, NodeId, SegmentId
from kvshare.errors import ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """
    A document, and what left the tree, which the caller drops from the KV tiers and the index as well.

    `to_pin`: the caller, who knows how much memory there is, pins these or refuses to.
    """

    document: dict[str, Any]
    freed_segments: tuple[SegmentId, ...] = ()
    removed_nodes: tuple[tuple[str, int], ...] = ()  # namespace and node id
    to_pin: tuple[NodeId, ...] = ()


Question = Callable[[DeltaTree, Mapping[str, Any]], Answer]

QUESTIONS: dict[str, Question] = {}  # what may be asked, by name


def question(answer: Callable[..., Answer]) -> Question:
    """
    A question whose arguments are the keywords of `answer`: text of a query string, or values of JSON.

    None is as good as not given.
    Raises:  RequestError that names the argument, for one that is missing, wrong or unknown: a misspelt
             `dry_run` must not evict
    """
    known = getfullargspec(answer).kwonlyargs
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(answer)

    @wraps(answer)
    def asked(tree: DeltaTree, arguments: Mapping[str, Any]) -> Answer:
        given = {name: value for name, value in arguments.items() if value is not None or name not in known}
        try:
            return checked(tree, **given)
        except ValidationError as exc:
            wrong = exc.errors(include_url=False)[0]
            param = str(wrong["loc"][0])
            problem = f"{wrong['msg'].replace('Input should be', 'expected')}, got {wrong['input']!r}"
            if param not in known:
                problem = f"unknown argument; expected one of: {', '.join(known)}"
            elif param not in given:
                problem = "is required"
            raise RequestError(f"{param}: {problem}", param=param) from exc

    QUESTIONS[answer.__name__] = asked
    return asked


def node_of(tree: DeltaTree, name: str, node_id: int) -> Node:
    """The node that the argument `name` names."""
    found = tree.get(NodeId(node_id))
    if found is None:
        raise not_found(name, node_id)
    return found


def not_found(name: str, node_id: int) -> RequestError:
    message = f"{name}: no node {node_id} is stored; it may have been evicted"
    return RequestError(message, param=name, code=ErrorCode.NODE_NOT_FOUND)


def namespace_of(tree: DeltaTree, digits: str | None) -> str | None:
    """The stored namespace with this digest, or with a digest that begins so."""
    if digits is None:
        return None
    found = {node.namespace for node in tree.nodes() if node.namespace.startswith(digits)}
    if len(found) != 1:
        raise RequestError(
            f"namespace: expected the digest of one stored namespace, {len(found)} begin with {digits}",
            param="namespace",
            code=ErrorCode.NAMESPACE_NOT_FOUND,
        )
    return found.pop()
