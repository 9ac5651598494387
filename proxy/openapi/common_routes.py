"""The routes that every engine has: probes, the documentation and those of operators."""

from __future__ import annotations

from functools import partial

from kvshare.admin import Evict, Pin, Unpin
from proxy.openapi.answers import AnyObject, HealthAnswer, LiveSettingsBody, PartsAnswer, ReadinessAnswer
from proxy.openapi.operation import (
    HTML,
    JSON,
    Operation,
    RouteAccess,
    RouteAnswer,
    RouteGroup,
    RouteParameter,
    number,
    one_of,
    text,
)

_PROBE = partial(Operation, "GET", group=RouteGroup.PROBES, access=RouteAccess.OPEN)
_ABOUT = partial(Operation, "GET", group=RouteGroup.ABOUT, access=RouteAccess.OPEN)
_OPERATORS = RouteGroup.OPERATORS
_ADMIN = partial(
    Operation,
    answers={200: RouteAnswer("The answer.", {JSON: AnyObject})},
    group=_OPERATORS,
    access=RouteAccess.ADMIN,
)
_ASK = partial(_ADMIN, "GET")
_ORDER = partial(_ADMIN, "POST")
_NAMESPACE = text("The digest of a namespace or its first digits.", minLength=4)
_TENANT = text("The name of a tenant.")
_FILES = {"text/css": None, "text/javascript": None, "image/svg+xml": None, HTML: None}

COMMON_ROUTES = (
    _PROBE("/health", "Whether the process answers", {200: RouteAnswer("It does.", {JSON: HealthAnswer})}),
    _PROBE(
        "/ready",
        "Whether requests are taken",
        {
            200: RouteAnswer("They are.", {JSON: ReadinessAnswer}),
            503: RouteAnswer("They are not.", {JSON: ReadinessAnswer}),
        },
        description="Not while the model is loaded, while the server drains, and when its engine has failed.",
    ),
    _PROBE(
        "/status",
        "How each part is, since when, and what to do",
        {200: RouteAnswer("The list; empty until the engine is up.", {JSON: PartsAnswer})},
        description="Of the parts that requests can be served without. Details are in /admin/status and "
        "in the log.",
    ),
    _ABOUT("/openapi.json", "This document", {200: RouteAnswer("OpenAPI 3.1.", {JSON: AnyObject})}),
    _ABOUT(
        "/docs", "This document as a page", {200: RouteAnswer("A page that needs no network.", {HTML: None})}
    ),
    Operation(
        "GET",
        "/metrics",
        "What is counted, for Prometheus",
        {200: RouteAnswer("In Prometheus' text format.", {"text/plain": None})},
        _OPERATORS,
        description="Open where no keys are configured.",
        access=RouteAccess.METRICS,
    ),
    Operation(
        "GET",
        "/admin/ui",
        "The dashboard",
        {308: RouteAnswer("To the same with a slash.", {HTML: None})},
        _OPERATORS,
        access=RouteAccess.OPEN,
    ),
    Operation(
        "GET",
        "/admin/ui/{name}",
        "A file of the dashboard, without data",
        {200: RouteAnswer("The file.", _FILES)},
        _OPERATORS,
        access=RouteAccess.OPEN,
        errors=(404,),
        path={"name": text("The file's name.", example="style.css")},
    ),
    _ASK("/admin/status", "What the server is and how its parts are"),
    _ASK(
        "/admin/activity",
        "What requests reused, saved and cost, over time, by tenant and by decision",
        errors=(400,),
        query={"minutes": number("How far back.", maximum=1440, default=60)},
    ),
    _ASK(
        "/admin/stats",
        "How much is stored, and what sharing costs",
        errors=(400,),
        query={"namespace": _NAMESPACE, "tenant": _TENANT},
    ),
    _ASK(
        "/admin/tree",
        "The stored prompts below their parents",
        description="No text is in it.",
        errors=(400,),
        query={
            "namespace": _NAMESPACE,
            "tenant": _TENANT,
            "root": number("Only below this prompt."),
            "depth": number("Levels of the tree.", maximum=64, default=4),
            "sort": one_of(("bytes", "hits", "age", "tokens"), "What those that come first have most of."),
            "limit": number("At most so many roots, and so many below each prompt."),
            "skip": number("After so many roots; with `root`, after so many below it."),
        },
    ),
    _ASK(
        "/admin/node/{id}",
        "One stored prompt",
        description="Whom it was edited from, where its KV lies, and with whom it shares it.",
        errors=(400,),
        path={"id": number("The prompt's number.", example=1)},
    ),
    _ASK(
        "/admin/diff",
        "The edits between two stored prompts",
        errors=(400,),
        query={
            "a": number("The prompt to start from.", example=1, required=True),
            "b": number("The prompt to arrive at.", example=2, required=True),
            "min_run": number("A shorter match counts as a change.", default=1),
        },
    ),
    _ASK(
        "/admin/requests",
        "What was planned for the latest requests, and what was done",
        description="Newest first. No text is in it.",
        errors=(400,),
        query={"limit": number("How many.", maximum=1000, default=20), "tenant": _TENANT},
    ),
    _ASK(
        "/admin/requests/{id}",
        "The same of one request",
        description="The latest 1,024 are known.",
        errors=(404,),
        path={"id": text("The X-KVShare-Request of its answer.", example="0123456789abcdef")},
    ),
    _ORDER(
        "/admin/evict",
        "Drop stored prompts",
        description="Exactly one of `node`, `namespace`, `tenant` and `all`.",
        body=Evict,
        example={"all": True, "dry_run": True},
    ),
    _ORDER(
        "/admin/pin",
        "Keep stored prompts in memory",
        description="One prompt, or all of a namespace or a tenant. At most half of the memory can be "
        "pinned.",
        body=Pin,
        example={"node": 1},
    ),
    _ORDER("/admin/unpin", "Let them go again when room is needed", body=Unpin, example={"node": 1}),
    _ASK("/admin/tenants", "Tenants, their keys, their limits and what they use of them"),
    _ASK(
        "/admin/usage",
        "What keys and tenants have used",
        description="Requests, prompt tokens by where their KV came from, tokens of answers, seconds saved; "
        "days are in UTC.",
        errors=(400,),
        query={
            "by": one_of(("key", "tenant", "day"), "What a row is of."),
            "since": RouteParameter("The first day.", {"type": "string", "format": "date"}, "2026-11-01"),
            "tenant": _TENANT,
        },
    ),
    _ASK("/admin/settings", "The settings in force, and where each comes from"),
    _ORDER(
        "/admin/settings",
        "Set settings until the server stops",
        body=LiveSettingsBody,
        example={"sharing.max_mode": "exact"},
    ),
    _ORDER("/admin/reload", "Read the files of settings and keys again", errors=(400,)),
)
