"""`kvshare requests`: what became of the latest requests of a server, as the dashboard lists them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import typer

from kvshare.cli.options import (
    MOST_REQUESTS,
    AsJson,
    Format,
    Key,
    Latest,
    OutputFormat,
    RequestId,
    TenantName,
    Url,
)
from kvshare.cli.output import show

_LOOKUP = ("prefix", "fingerprint", "embedding", "plan", "fetch")  # stages, as the server counts them
_SHOWN = 8  # digits of an id, which are enough to name it
_WHOLE = 32  # digits of an id


def requests(
    request_id: RequestId = None,
    limit: Latest = 20,
    tenant: TenantName = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Show what became of the latest requests, or of one: what was shared, why not more, times."""
    from kvshare.cli.server import server

    asked = server(url, key)
    chosen = OutputFormat.JSON if as_json else output_format
    if request_id is not None:
        document = asked.call(f"/admin/requests/{_whole_id(asked, request_id)}")
        show("request", document if chosen is OutputFormat.JSON else detailed(document), chosen)
        return
    document = asked.call("/admin/requests", query={"limit": limit, "tenant": tenant})
    show("requests", document if chosen is OutputFormat.JSON else listed(document), chosen)


def listed(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"rows": [_row(request) for request in document["requests"]]}


def detailed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the view's document of one request. Stages that it did not have are left out."""
    took = {stage: seconds for stage, seconds in document["seconds"].items() if seconds is not None}
    stored = [entry["node"] for entry in document.get("stored", ()) if entry["node"] is not None]
    return {**document, **_row(document), "id": document["id"], "took": took, "stored_as": stored}


def _whole_id(asked: Any, prefix: str) -> str:
    """Return the id that begins so, or the prefix if none does. Raises a usage error if several do."""
    if len(prefix) >= _WHOLE:
        return prefix
    known = asked.call("/admin/requests", query={"limit": MOST_REQUESTS})["requests"]
    ids = [request["id"] for request in known if request["id"].startswith(prefix)]
    if len(ids) > 1:
        raise typer.BadParameter(f"{len(ids)} requests have an id that begins with {prefix}: give more of it")
    return str(ids[0]) if ids else prefix


def _row(request: Mapping[str, Any]) -> dict[str, Any]:
    prompts, seconds = request["prompts"], request["seconds"]
    num_tokens = sum(prompt["prompt_tokens"] for prompt in prompts)
    num_reused = sum(prompt["exact"] + prompt["copied"] for prompt in prompts)
    return {
        "id": request["id"][:_SHOWN],
        "came_in": datetime.fromtimestamp(request["at"]).strftime("%H:%M:%S"),
        "key": request["key"],
        "tenant": request["tenant"],
        "outcome": _outcome(request),
        "num_tokens": num_tokens or None,  # 0: it was not tokenized here
        "reused_share": num_reused / num_tokens if num_tokens else None,
        "lookup_s": sum(seconds.get(stage) or 0.0 for stage in _LOOKUP) or None,
        "first_token_s": seconds.get("first_token"),
        "total_s": None if request["status"] is None else seconds["total"],
    }


def _outcome(request: Mapping[str, Any]) -> str:
    """Say what was shared and why not more; or that the request failed, or is not answered yet."""
    if request["status"] is None:
        return "under way"
    if request["status"] >= 400:
        return f"failed ({request['status']})"
    decision = request["prompts"][0]["decision"] if request["prompts"] else "not planned"
    reason = request["cache_miss_reason"]
    return decision if reason is None else f"{decision}: {reason['type']}"
