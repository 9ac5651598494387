"""
Administrators' queries: how much a store holds, how prompts are related, what differs between two of them.
A question changes nothing; see `kvshare.admin.commands` for what does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field

from delta_tree import (
    DeltaTree,
    Node,
    TreeStats,
    UnknownNodeError,
    UnknownSegmentError,
    align,
)
from kvshare.admin.arguments import (
    NO_TENANTS,
    STRICT,
    Digest,
    Number,
    TenantName,
    chosen,
    node_of,
    not_found,
)
from kvshare.admin.documents import (
    DiffDocument,
    NodeDocument,
    StoredTotals,
    StoreStats,
    TreeDocument,
    TreeEntry,
)
from kvshare.admin.entries import edits_of, piece_of, summary_of, tenant_of
from kvshare.errors import ErrorCode, RequestError
from kvshare.tenants import Tenants

TreeOrder = Literal["bytes", "hits", "age", "tokens"]
DocumentT_co = TypeVar("DocumentT_co", covariant=True)

_MOST_LISTED = 100  # prompts that belong to one
_MIN_RUN = 16  # of the edits from a parent: shorter matches are accidental
_MAX_DEPTH = 64  # of the document; the tree may be deeper, and `root` starts further down


class StoreQuestion(Protocol[DocumentT_co]):
    """Any of the questions below."""

    def answer(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> DocumentT_co: ...


@dataclass(frozen=True, slots=True)
class StatsQuestion:
    """Totals of what is stored, also per namespace and per tenant."""

    __pydantic_config__ = STRICT
    namespace: Digest | None = None
    tenant: TenantName | None = None

    def answer(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> StoreStats:
        digests = chosen(tree, tenants, namespace=self.namespace, tenant=self.tenant)
        totals = {
            digest: _totals(tree.stats(digest))
            for digest in sorted(tree.namespaces() if digests is None else digests)
        }
        owners = {digest: tenant_of(tenants, digest) for digest in totals}
        of_tenants: defaultdict[str, list[StoredTotals]] = defaultdict(list)
        for digest, row in totals.items():
            if (owner := owners[digest]) is not None:
                of_tenants[owner].append(row)
        return {
            "totals": _totals(tree.stats()) if digests is None else _sum(totals.values()),
            "namespaces": [
                {"namespace": digest, "tenant": owners[digest], **row} for digest, row in totals.items()
            ],
            "tenants": [
                {
                    "tenant": name,
                    "max_bytes": tenants.max_bytes(name),
                    **_sum(rows),
                }
                for name, rows in sorted(of_tenants.items())
            ],
        }


@dataclass(frozen=True, slots=True)
class TreeQuestion:
    """
    Prompts below their parents, `depth` levels of them; of siblings, those that have most come first.

    `limit`: at most so many roots, and so many below each prompt; `skip`: after so many roots, or with `root`
    so many below it.
    """

    __pydantic_config__ = STRICT
    root: Number | None = None
    namespace: Digest | None = None
    tenant: TenantName | None = None
    depth: Annotated[Number, Field(le=_MAX_DEPTH)] = 4
    sort: TreeOrder = "bytes"
    limit: Number | None = None
    skip: Number | None = None

    def answer(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> TreeDocument:
        digests = chosen(tree, tenants, namespace=self.namespace, tenant=self.tenant)
        if self.root is None:
            roots = _roots(tree, digests)
        else:
            node = node_of(tree, "root", self.root)
            roots = [node] if digests is None or node.namespace in digests else []
        shown = roots if self.root is not None else self._page(tree, roots, self.skip)
        skip = None if self.root is None else self.skip
        entries = self._branches(tree, tenants, shown, self.depth, skip=skip)
        return {"depth": self.depth, "num_roots": len(roots), "roots": entries}

    def _branches(
        self,
        tree: DeltaTree,
        tenants: Tenants,
        nodes: Collection[Node],
        levels: int,
        *,
        skip: int | None = None,
    ) -> list[TreeEntry]:
        """Return an entry for each prompt, `levels` levels deep, without its first `skip` children."""
        if not levels:
            return []
        entries: list[TreeEntry] = []
        for node in nodes:
            try:
                children = [tree.node(child) for child in tree.children(node.node_id)]
                summary = summary_of(tree, tenants, node)
                page = self._page(tree, children, skip) if levels > 1 else []
            except UnknownNodeError:
                continue  # evicted since we began; a running server does not wait for us
            below = self._branches(tree, tenants, page, levels - 1)
            entries.append({**summary, "num_children": len(children), "children": below})
        return entries

    def _page(self, tree: DeltaTree, siblings: Sequence[Node], skip: int | None) -> Sequence[Node]:
        first = skip or 0
        last = None if self.limit is None else first + self.limit
        return sorted(siblings, key=self._weight(tree, siblings), reverse=True)[first:last]

    def _weight(self, tree: DeltaTree, siblings: Sequence[Node]) -> Callable[[Node], float]:
        """Return the figure by which siblings are sorted."""
        match self.sort:
            case "bytes":
                sizes = tree.bytes_of_subtrees([node.node_id for node in siblings])
                return lambda node: sizes.get(node.node_id, 0)
            case "hits":
                return lambda node: node.num_hits
            case "age":
                return lambda node: -node.created_at
            case "tokens":
                return lambda node: node.num_tokens


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """One prompt: its parents, its edits, its pieces of KV, and the prompts that share them."""

    __pydantic_config__ = STRICT
    id: Number

    def answer(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> NodeDocument:
        node = node_of(tree, "id", self.id)
        try:
            parents, children = tree.ancestors(node.node_id), tree.children(node.node_id)
            origin = tree.node(parents[0]) if parents else node
            shared_with = tree.shared_with(node.node_id, limit=_MOST_LISTED)
            script = align(origin.token_ids, node.token_ids, min_run=_MIN_RUN)
            return {
                **summary_of(tree, tenants, node),
                "parents": list(parents),
                "num_children": len(children),
                "children": list(children[:_MOST_LISTED]),
                "edits": edits_of(script) if parents else None,
                "pieces": [piece_of(tree, *row) for row in node.pieces.rows()],
                "num_shared_with": max(len(shared_with), tree.num_sharing(node.node_id)),
                "shared_with": [{"id": each.node_id, "num_tokens": each.num_tokens} for each in shared_with],
            }
        except (UnknownNodeError, UnknownSegmentError) as exc:  # evicted since we began
            raise not_found("id", node.node_id) from exc


@dataclass(frozen=True, slots=True)
class DiffQuestion:
    """The token-level edits from prompt `a` to `b` of one namespace; a match below `min_run` is a change."""

    __pydantic_config__ = STRICT
    a: Number
    b: Number
    min_run: Number = 1

    def answer(self, tree: DeltaTree, tenants: Tenants = NO_TENANTS) -> DiffDocument:
        source, target = node_of(tree, "a", self.a), node_of(tree, "b", self.b)
        if source.namespace != target.namespace:
            raise RequestError(
                "b: expected a node of the same namespace as a", param="b", code=ErrorCode.NAMESPACE_MISMATCH
            )
        script = align(source.token_ids, target.token_ids, min_run=self.min_run)
        prefix = next((keep.length for keep in script.keeps if keep.source == keep.target == 0), 0)
        return {
            "a": self.a,
            "b": self.b,
            "namespace": source.namespace,
            "num_common_prefix": prefix,
            "kept_share_of_a": script.num_kept / source.num_tokens,
            "kept_share_of_b": script.num_kept / target.num_tokens,
            "edits": edits_of(script),
        }


def _totals(stats: TreeStats) -> StoredTotals:
    return {
        "num_nodes": stats.num_nodes,
        "num_roots": stats.num_roots,
        "num_pinned": stats.num_pinned,
        "num_segments": stats.num_segments,
        "num_tokens": stats.num_tokens,
        "num_stored_tokens": stats.num_stored_tokens,
        "num_bytes": stats.num_bytes,
        "max_depth": stats.max_depth,
    }


def _sum(rows: Iterable[StoredTotals]) -> StoredTotals:
    """Sum up several namespaces, which share nothing with each other."""
    listed = list(rows)
    return {
        "num_nodes": sum(row["num_nodes"] for row in listed),
        "num_roots": sum(row["num_roots"] for row in listed),
        "num_pinned": sum(row["num_pinned"] for row in listed),
        "num_segments": sum(row["num_segments"] for row in listed),
        "num_tokens": sum(row["num_tokens"] for row in listed),
        "num_stored_tokens": sum(row["num_stored_tokens"] for row in listed),
        "num_bytes": sum(row["num_bytes"] for row in listed),
        "max_depth": max((row["max_depth"] for row in listed), default=0),
    }


def _roots(tree: DeltaTree, namespaces: Collection[str] | None) -> Sequence[Node]:
    if namespaces is None:
        return tree.roots()
    return [node for namespace in sorted(namespaces) for node in tree.roots(namespace)]
