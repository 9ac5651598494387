"""Where the commands about a store get their documents from."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

Api = Literal["chat", "completions", "responses", "messages"]
# As `kvshare.admin` has it, whose import takes long.
TreeOrder = Literal["bytes", "hits", "age", "tokens"]  # the heaviest, the busiest, the oldest, the longest
Document = Mapping[str, Any]


class Source(Protocol):
    """A running server, or the metadata of a stopped one. An argument of None is the same as absent."""

    def stats(self, *, namespace: str | None) -> Document: ...

    def tree(self, *, root: int | None, namespace: str | None, depth: int, sort: TreeOrder) -> Document: ...

    def node(self, node_id: int) -> Document: ...

    def diff(self, a: int, b: int, *, min_run: int) -> Document: ...

    def evict(
        self, *, node: int | None, namespace: str | None, everything: bool, dry_run: bool
    ) -> Document: ...

    def pin(self, *, node: int | None, namespace: str | None) -> Document: ...

    def unpin(self, *, node: int | None, namespace: str | None, everything: bool) -> Document: ...

    def explain(self, request: Mapping[str, Any], *, api: Api) -> Document: ...
