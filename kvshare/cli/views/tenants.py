"""Settings, tenants and what they use."""

from typing import Any

from kvshare.cli.views.parts import Columns, Document, Parts, bold, facts, of, table
from kvshare.cli.views.units import counted, duration, number, percent, size, text

_CONFIG: Columns = {"setting": of("path"), "value": of("text"), "from": of("origin")}
_USED: Columns = {
    "requests": of("requests", number),
    "refused": of("refused", number),
    "tokens": of("prompt_tokens", number),
    "reused": lambda used: _share(used["exact"] + used["copied"], used["prompt_tokens"]),
    "saved": of("saved_s", duration),
}
_USAGE_BY: dict[str, Columns] = {
    "key": {"tenant": of("tenant"), "key": of("key"), **_USED},
    "tenant": {"tenant": of("tenant"), **_USED},
    "day": {"day": of("day"), **_USED},
}
_TOP_TENANTS: Columns = {
    "tenant": of("tenant"),
    "requests/s": of("requests_per_s", number, ".3g"),
    "tokens": of("prompt_tokens", number),
    "reused": of("hit_share", percent, 1),
    "saved": of("saved_s", duration),
    "failed": of("failed", number),
}
_TOP_LOOKUPS: Columns = {
    "slowest lookups": of("id"),
    "tenant": of("tenant"),
    "lookup": of("lookup_s", duration),
    "in all": of("total_s", duration),
    "tokens": of("prompt_tokens", number),
    "decision": of("decision"),
}
_TENANTS: Columns = {
    "tenant": of("tenant"),
    "keys": of("keys", len),
    "in flight": lambda row: f"{row['in_flight']}{_limit(row['limits']['max_in_flight'])}",
    "requests left": lambda row: _left(row["requests_left"], row["limits"]["requests_per_minute"]),
    "KV": lambda row: size(row["kv_bytes"]) + _limit(size(row["limits"]["max_kv_bytes"])),
    "evicted": lambda row: number(row.get("evicted")),  # which servers before 0.3.0 do not say
    "mode": lambda row: row["limits"]["max_mode"],
    "refused": lambda row: sum(row["refused"].values()),
}


def config(document: Document) -> Parts:
    rows = document["rows"]
    yield table(_CONFIG, rows) if rows else "all settings are the defaults; --all shows them"


def config_valid(document: Document) -> Parts:
    changed, keys = counted(document["changed"], "setting"), counted(document["keys"], "key")
    tenants = counted(document["tenants"], "tenant")
    yield f"the settings are valid: {changed} changed, {keys} of {tenants}"


def reloaded(document: Document) -> Parts:
    lines = [_difference(path, change) for path, change in document["settings"].items()]
    for what in ("key", "tenant", "rule"):
        changes = document[f"{what}s"]
        lines += [f"{what} {name} {how}" for how in ("added", "removed") for name in changes[how]]
        lines += [
            f"{what} {name}: {_difference(path, change)}"
            for name, changed in changes["changed"].items()
            for path, change in changed.items()
        ]
    yield from lines or ["nothing changed"]
    for path, change in document["needs_restart"].items():
        yield f"after a restart: {_difference(path, change)}"


def _difference(path: str, change: Document) -> str:
    old, new = ("null" if change[when] is None else text(change[when]) for when in ("from", "to"))
    return f"{path} is another one" if new == "hidden" else f"{path} is {new}, was {old}"


def usage(document: Document) -> Parts:
    if not document["rows"]:
        yield "no requests"
        return
    total = {**document["total"], "tenant": "all", "key": "", "day": "all"}
    yield table(_USAGE_BY[document["by"]], document["rows"], total=total)
    days = f"{document['first_day']} to {document['last_day']} (UTC)"
    yield f"{days}; refused requests are not among the requests"


def top(document: Document) -> Parts:
    tenants, slowest = document["tenants"], document["slowest_lookups"]
    yield from (bold(f"kvshare {document['version']}, {document['model']}"), facts(_now(document)))
    for part in document["not_well"]:
        named = f" {part['name']}" if "name" in part else ""
        yield f"{part['state']}: {part['part']}{named}: {part['detail']}"
    yield from ("", table(_TOP_TENANTS, tenants) if tenants else "no requests in the last minute")
    if document["num_tenants"] > len(tenants):
        yield f"and {counted(document['num_tenants'] - len(tenants), 'tenant')} more"
    if slowest:
        yield from ("", table(_TOP_LOOKUPS, slowest))
    yield from ("", f"figures of the last {number(document['window_s'], '.3g')} s")


def _now(document: Document) -> dict[str, str]:
    waiting = f"{document['num_running']} running, {document['num_waiting']} waiting"
    prompt_tokens = f"{number(document['prompt_tokens'])} prompt tokens"
    reused = f"{percent(document['hit_share'], 1) or 'nothing'}: {number(document['reused_tokens'])}"
    prompts = counted(document["num_nodes"], "prompt")
    return {
        "requests": f"{number(document['requests_per_s'], '.3g')}/s, {waiting}, {document['failed']} failed",
        "reused": f"{reused} of {prompt_tokens}",
        "saved": f"{duration(document['saved_s'])} net, {duration(document['spent_s'])} spent on looking up",
        "KV": f"{size(document['kv_bytes'])} of {size(document['kv_budget_bytes'])} in {prompts}",
    }


def tenants(document: Document) -> Parts:
    yield table(_TENANTS, document["tenants"]) if document["tenants"] else "no tenants"


def _share(reused: int, prompt_tokens: int) -> str:
    return percent(reused / prompt_tokens) if prompt_tokens else ""


def _limit(most: Any) -> str:
    return f"/{most}" if most else ""


def _left(requests: int | None, most: int | None) -> str:
    return f"{requests}/{most}" if most else ""
