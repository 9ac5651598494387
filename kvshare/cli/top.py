"""`kvshare top`: what a running server does now, again and again: like its namesake for processes."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

from kvshare.cli.options import Interval, Key, Once, OutputFormat, TopJson, Url
from kvshare.cli.output import note, show
from kvshare.errors import UnreachableError

_WINDOW_S = 60.0
_MOST_REQUESTS = 500  # that are looked at; with more in a minute the window is shorter
_MOST_TENANTS = 8
_MOST_SLOW = 5
_LOOKUP = ("prefix", "fingerprint", "embedding", "plan", "fetch")  # as the server counts them


def top(
    once: Once = False, as_json: TopJson = False, interval: Interval = 2.0, url: Url = None, key: Key = None
) -> None:
    """Show what a running server does: requests, reuse, queue, tenants, slowest lookups. Ctrl-C ends it."""
    from kvshare.cli.server import server

    asked = server(url, key)
    is_live = not once and (as_json or sys.stdout.isatty())
    try:
        while True:
            _show(asked, as_json=as_json, is_live=is_live)
            if not is_live:
                return
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def _show(asked: Any, *, as_json: bool, is_live: bool) -> None:
    """Raises what asking raises; one that is shown again and again goes on without an answer."""
    try:
        document = summary(
            asked.status(), asked.call("/admin/requests", query={"limit": str(_MOST_REQUESTS)})["requests"]
        )
    except UnreachableError as exc:
        if not is_live:
            raise
        note(f"{exc}; it is asked again")
        return
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False, indent=None if is_live else 2))
        return
    if is_live:
        typer.echo("\x1b[H\x1b[2J", nl=False)  # to the corner, and an empty screen
    show("top", document, OutputFormat.TERMINAL)


def summary(status: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Figures of the last minute, from what `/admin/status` and `/admin/requests` say.

    Those of tokens and seconds are as planned; requests that were not tokenized here count as requests only.
    """
    now, span_s = status["now"], _WINDOW_S
    if len(requests) >= _MOST_REQUESTS:  # older ones are not listed
        span_s = min(span_s, max(now - requests[-1]["at"], 1e-3))
    recent = [request for request in requests if request["at"] >= now - span_s]
    by_tenant: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for request in recent:
        by_tenant[request["tenant"]].append(request)
    tenants = [{"tenant": name, **_figures(some, span_s)} for name, some in by_tenant.items()]
    slowest = sorted(map(_lookup, recent), key=lambda request: -request["lookup_s"])
    names = ("version", "model", "num_running", "num_waiting", "num_nodes", "kv_bytes", "kv_budget_bytes")
    return {
        **{name: status[name] for name in names},
        "now": now,
        "window_s": span_s,
        **_figures(recent, span_s),
        "num_tenants": len(tenants),
        "tenants": sorted(tenants, key=lambda request: -request["requests"])[:_MOST_TENANTS],
        "slowest_lookups": [request for request in slowest if request["lookup_s"] > 0][:_MOST_SLOW],
        "not_well": [part for part in status["parts"] if part["state"] != "ok"],
    }


def _figures(requests: Iterable[Mapping[str, Any]], span_s: float) -> dict[str, Any]:
    some = list(requests)
    prompts = [prompt for each in some for prompt in each["prompts"]]
    num_tokens = sum(prompt["prompt_tokens"] for prompt in prompts)
    num_reused = sum(prompt["exact"] + prompt["copied"] for prompt in prompts)
    spent_s = sum(_lookup_s(each) for each in some)
    return {
        "requests": len(some),
        "requests_per_s": len(some) / span_s,
        "failed": sum((each["status"] or 200) >= 400 for each in some),
        "prompt_tokens": num_tokens,
        "reused_tokens": num_reused,
        "hit_share": num_reused / num_tokens if num_tokens else None,
        "saved_s": sum(prompt["saved_s"] for prompt in prompts) - spent_s,
        "spent_s": spent_s,
    }


def _lookup(request: Mapping[str, Any]) -> dict[str, Any]:
    prompts = request["prompts"]
    return {
        "id": request["id"],
        "tenant": request["tenant"],
        "lookup_s": _lookup_s(request),
        "total_s": request["seconds"]["total"],
        "prompt_tokens": sum(prompt["prompt_tokens"] for prompt in prompts),
        "decision": prompts[0]["decision"] if prompts else "-",
        "reason": (prompts[0]["reason"] if prompts else None) or "",
    }


def _lookup_s(request: Mapping[str, Any]) -> float:
    return float(sum(request["seconds"].get(stage) or 0.0 for stage in _LOOKUP))
