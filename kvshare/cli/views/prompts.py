"""Views of stored prompts."""

from collections.abc import Iterator

from kvshare.cli.costs import in_words
from kvshare.cli.views.parts import Columns, Document, Parts, bold, cells, facts, of, table
from kvshare.cli.views.units import ago, counted, duration, idle, number, percent, size

_MOST_INDENTED = 4  # levels; what is further below is indented as much
_SHORT = 12  # characters of a namespace's digest


def _hit_rate(tier: Document) -> str:
    hits = tier["num_hits"]
    return percent(hits / (hits + tier["num_misses"]), 1) if hits else ""


def _children(document: Document) -> str:
    children = document["children"]
    hidden = document["num_children"] - len(children)
    return (", ".join(map(str, children)) or "none") + (f" and {hidden} more" if hidden > 0 else "")


_STATS: Columns = {
    "namespace": lambda row: row["namespace"][:_SHORT],
    "nodes": of("num_nodes", number),
    "pinned": of("num_pinned", number),
    "depth": of("max_depth", number),
    "tokens": of("num_tokens", number),
    "own tokens": of("num_stored_tokens", number),
    "segments": of("num_segments", number),
    "KV": of("num_bytes", size),
}
_STATS_OF_TENANTS: Columns = {
    "tenant": of("tenant"),
    "nodes": of("num_nodes", number),
    "pinned": of("num_pinned", number),
    "tokens": of("num_tokens", number),
    "own tokens": of("num_stored_tokens", number),
    "KV": of("num_bytes", size),
    "limit": of("max_bytes", size),
}
_TIERS: Columns = {
    "tier": of("name"),
    "segments": of("num_segments", number),
    "KV": of("num_bytes", size),
    "limit": of("max_bytes", size),
    "found": of("num_hits", number),
    "not found": of("num_misses", number),
    "hit rate": _hit_rate,
    "late": of("num_late", number),
    "dropped": of("num_dropped", number),
    "to write": of("num_due_bytes", size),
}
_DAMAGED: Columns = {"file": of("file"), "problem": of("problem")}
_TREE: Columns = {
    "prompt": of("prompt"),
    "tokens": of("num_tokens", number),
    "exact": of("exact_length", number),
    "own KV": of("own_bytes", size),
    "in all": of("subtree_bytes", size),
    "hits": of("num_hits", number),
    "unused": of("idle_s", idle),
    "state": lambda prompt: "pinned" if prompt["pinned"] else "",
}
_NODE: Columns = {
    "node": of("id"),
    "namespace": of("namespace"),
    "tokens": lambda node: f"{number(node['num_tokens'])}, {number(node['exact_length'])} exact",
    "KV": lambda node: f"{size(node['own_bytes'])} own, {size(node['subtree_bytes'])} with its children",
    "used": lambda node: f"{counted(node['num_hits'], 'hit')}, last {ago(node['idle_s'])}",
    "stored": of("age_s", ago),
    "pinned": lambda node: "yes" if node["pinned"] else "no",
    "parents": lambda node: " < ".join(map(str, node["parents"])) or "none: a root",
    "children": _children,
}
_PIECES: Columns = {
    "positions": lambda piece: f"{piece['start']}-{piece['end']}",
    "segment": of("segment"),
    "offset": of("offset"),
    "shift": of("shift", number, "+d"),
    "generation": of("generation"),
    "used by": of("num_references"),
    "bytes": of("num_bytes", size),
}
_SHARED: Columns = {"shares with node": of("id"), "tokens": of("num_tokens", number)}
_EDITS: Columns = {
    "edit": of("op"),
    "from": lambda edit: "-".join(map(str, edit["source"])),
    "to": lambda edit: "-".join(map(str, edit["target"])),
    "tokens": lambda edit: number(max(end - start for start, end in (edit["source"], edit["target"]))),
}


def stats(document: Document) -> Parts:
    if tenants := document.get("tenants"):
        yield from (table(_STATS_OF_TENANTS, tenants), "")
    yield table(_STATS, document["namespaces"], total={**document["totals"], "namespace": "all"})
    for digest, owner in document.get("owners", {}).items():
        yield f"{digest[:_SHORT]}: {_owner(owner)}"
    if pins := document.get("pins"):
        yield f"pinned: {size(pins['num_bytes'])} of KV, of {size(pins['max_bytes'])} that may be"
    if costs := in_words(document.get("costs")):  # those of another version are not shown
        yield from (costs.origin, costs.rates, f"{costs.break_even} if a tenth is computed")
    for load in (document.get("control") or {"loads": ()})["loads"]:
        more, less = number(load["num_blocks_more"]), number(load["num_blocks_less"])
        slower = load["slower"]
        longer = "" if slower is None else f"; with more of it requests take {slower:+.0%} longer"
        yield f"{load['load']} in flight: {load['shared']}{longer} ({more} and {less} blocks compared)"


def _owner(owner: Document) -> str:
    names = owner["keys"]
    keys = f", {'key' if len(names) == 1 else 'keys'} {', '.join(names)}" if names else ""
    return f"tenant {owner['tenant']}{' (private)' if owner['scope'] == 'private' else ''}{keys}"


def tiers(document: Document) -> Parts:
    yield table(_TIERS, document["tiers"])
    for tier in document["tiers"]:
        if tier["problem"]:
            yield f"nothing is written to {tier['name']}: {tier['problem']}"


def store_verify(document: Document) -> Parts:
    damaged = document["damaged"]
    read = f"{size(document['num_bytes'])}, read in {duration(document['seconds'])}"
    yield f"{counted(document['num_objects'], 'object')} of KV, {read}: {'' if damaged else 'all are whole'}"
    if damaged:
        yield from (f"{counted(len(damaged), 'object')} damaged", table(_DAMAGED, damaged))


def store_gc(document: Document) -> Parts:
    files = f"{counted(document['num_files'], 'file')} of KV that belong to no prompt"
    yield f"{'would delete' if document['dry_run'] else 'deleted'} {files}, {size(document['num_bytes'])}"


def tree(document: Document) -> Parts:
    """Yield the rows of each namespace; prompts are indented below those that they were edited from."""
    namespaces: dict[str, list[Document]] = {}
    for root in document["roots"]:
        namespaces.setdefault(root["namespace"], []).extend(_branch(root, level=0))
    if not namespaces:
        yield "the store is empty"
    owners = document.get("owners", {})
    for place, (namespace, rows) in enumerate(namespaces.items()):
        if place:
            yield ""
        owner = f": {_owner(owners[namespace])}" if namespace in owners else ""
        yield from (bold(f"namespace {namespace[:_SHORT]}", owner), table(_TREE, rows))


def _branch(entry: Document, level: int) -> Iterator[Document]:
    """Yield a prompt's row, then those of what is below it."""
    indent = "  " * min(level, _MOST_INDENTED)
    yield {**entry, "prompt": f"{indent}{entry['id']}"}
    for child in entry["children"]:
        yield from _branch(child, level + 1)
    if hidden := entry["num_children"] - len(entry["children"]):
        yield {**dict.fromkeys(entry), "prompt": f"{indent}  {hidden} more"}


def node(document: Document) -> Parts:
    yield facts(cells(document, _NODE))
    if document["edits"] is not None:
        yield from ("", bold("edits of the parent"), table(_EDITS, document["edits"]["ops"]))
    yield from ("", bold("pieces"), table(_PIECES, document["pieces"]))
    if shared := document["shared_with"]:
        yield from ("", table(_SHARED, shared))
        if hidden := document["num_shared_with"] - len(shared):
            yield f"and {hidden} more"


def diff(document: Document) -> Parts:
    first, second = (number(document[f"kept_share_of_{side}"], ".1%") for side in "ab")
    equal, prefix = document["edits"]["counts"]["keep"], document["num_common_prefix"]
    yield (
        f"{document['a']} -> {document['b']}: {equal:,} equal tokens ({first} of the first, "
        f"{second} of the second), {prefix:,} of them as common prefix"
    )
    yield table(_EDITS, document["edits"]["ops"])


def evict(document: Document) -> Parts:
    done = "would evict" if document["dry_run"] else "evicted"
    if "unreadable" in document:
        yield f"{done} the whole file, which cannot be read: {document['unreadable']}"
        return
    nodes, segments = counted(document["num_nodes"], "node"), counted(document["num_segments"], "segment")
    yield f"{done} {nodes} and {segments}, {size(document['freed_bytes'])} of KV"


def pin(document: Document) -> Parts:
    yield f"pinned {_pointing(document)}"


def unpin(document: Document) -> Parts:
    yield f"unpinned {_pointing(document)}"


def _pointing(document: Document) -> str:
    prompts = counted(document["num_nodes"], "prompt")
    return f"{prompts}, which point to {size(document['num_bytes'])} of KV"
