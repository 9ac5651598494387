"""The source of the store commands' documents: a running server, or a stopped one's files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Api = Literal["chat", "completions", "responses", "messages"]
# As `kvshare.admin` has it, whose import takes long.
TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The prompts that a command is for: exactly one of these is set."""

    node: int | None = None
    namespace: str | None = None
    tenant: str | None = None
    everything: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments under `kvshare.admin`'s names."""
        named = {"node": self.node, "namespace": self.namespace, "tenant": self.tenant}
        return {**named, "all": True} if self.everything else named


class Source(Protocol):
    """A running server, or the metadata of a stopped one. An argument of None is the same as absent."""

    def stats(self, *, namespace: str | None, tenant: str | None) -> Document: ...

    def tiers(self) -> Document: ...

    def tree(
        self, *, root: int | None, namespace: str | None, tenant: str | None, depth: int, sort: TreeOrder
    ) -> Document: ...

    def node(self, node_id: int) -> Document: ...

    def diff(self, a: int, b: int, *, min_run: int) -> Document: ...

    def evict(self, which: Chosen, *, older_than_s: int | None, dry_run: bool) -> Document: ...

    def pin(self, which: Chosen) -> Document: ...

    def unpin(self, which: Chosen) -> Document: ...

    def explain(
        self, request: Mapping[str, Any], *, api: Api, tenant: str | None, key: str | None
    ) -> Document: ...
