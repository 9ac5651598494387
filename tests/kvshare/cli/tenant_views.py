"""Documents of what `kvshare usage`, `requests`, `tenants` and `config` show, as wide as they get."""

from typing import Any

from kvshare.cli.requests import detailed, listed

USED = {
    "requests": 123_456,
    "refused": 12_345,
    "failed": 123,
    "prompt_tokens": 234_567_890,
    "exact": 123_456_789,
    "copied": 12_345_678,
    "repaired": 1_234_567,
    "recomputed": 97_530_856,
    "completion_tokens": 12_345_678,
    "saved_s": 12_345.67,
}
_NOW = {
    "requests": 12_345,
    "requests_per_s": 205.75,
    "failed": 123,
    "prompt_tokens": 234_567_890,
    "reused_tokens": 123_456_789,
    "hit_share": 0.526,
    "saved_s": 12_345.67,
    "spent_s": 123.45,
}
TOP = {
    **_NOW,
    "version": "0.3.0",
    "model": "SmolLM2-135M-Instruct",
    "now": 1.8e9,
    "window_s": 60.0,
    "num_tenants": 12,
    "num_running": 128,
    "num_waiting": 1024,
    "num_nodes": 123_456,
    "kv_bytes": 123_456_789_012,
    "kv_budget_bytes": 234_567_890_123,
    "tenants": [{**_NOW, "tenant": "north-america"}],
    "slowest_lookups": [
        {
            "id": "0123456789abcdef0123456789abcdef",
            "tenant": "north-america",
            "lookup_s": 0.123,
            "total_s": 12.34,
            "prompt_tokens": 131_072,
            "decision": "approx",
            "reason": "deviates_too_much",
        }
    ],
    "not_well": [
        {
            "part": "store",
            "state": "reduced",
            "since": 1.8e9,
            "detail": "metadata of prompts are in memory, and lost with the process: it is full",
        }
    ],
}
REQUEST = {
    "id": "0123456789abcdef0123456789abcdef",
    "key": "chatbot-1",
    "tenant": "north-america",
    "at": 1.8e9,
    "endpoint": "/v1/chat/completions",
    "mode": "approx",
    "status": 200,
    "finish_reason": "stop",
    "rules": ["nonce", "clock"],
    "cache_miss_reason": {"type": "deviates_too_much", "message": "Put what changes near the end."},
    "prompts": [
        {
            "decision": "approx",
            "prompt_tokens": 131_072,
            "exact": 120_000,
            "copied": 10_000,
            "recomputed": 1_000,
            "repaired": 72,
            "donors": [8_654_221_355_326_034, 8_654_221_355_326_035],
            "prediction": {"expected": 0.0123, "bound": 0.0321, "limit": 0.05, "rule": "windows"},
        }
    ],
    "completion_tokens": 12_345,
    "seconds": {"total": 123.4567, "tokenize": 0.123, "first_token": 12.345, "prefix": 0.0001, "plan": 0.123},
    "stored": [{"node": 8_654_221_355_326_036, "settled": True}],
    "gone": [8_654_221_355_326_034],
}
TENANT_VIEWS: dict[str, Any] = {
    "requests": listed({"requests": [REQUEST, {**REQUEST, "status": None}, {**REQUEST, "prompts": []}]}),
    "request": detailed(REQUEST),
    "top": TOP,
    "usage": {
        "by": "key",
        "first_day": "2026-11-01",
        "last_day": "2026-11-30",
        "rows": [{**USED, "tenant": "north-america", "key": "chatbot-1"}],
        "total": USED,
    },
    "tenants": {
        "tenants": [
            {
                "tenant": "north-america",
                "keys": ["chatbot-1", "chatbot-2"],
                "in_flight": 128,
                "requests_left": 12_345,
                "kv_bytes": 123_456_789_012,
                "evicted": 123_456,
                "limits": {
                    "max_in_flight": 256,
                    "requests_per_minute": 60_000,
                    "max_kv_bytes": 234_567_890_123,
                    "max_mode": "approx",
                },
                "refused": {"requests_per_minute": 12_345},
            }
        ]
    },
    "config": {
        "rows": [
            {"path": "sharing.max_deviation", "text": "0.05", "origin": "KVSHARE_SHARING__MAX_DEVIATION"}
        ]
    },
    "config_valid": {"changed": 12, "keys": 1234, "tenants": 123},
    "reloaded": {
        "settings": {"sharing.max_mode": {"to": "exact", "from": "approx"}},
        "keys": {
            "added": ["chatbot-1"],
            "removed": [],
            "changed": {"chatbot-2": {"sha256": {"from": "hidden", "to": "hidden"}}},
        },
        "tenants": {
            "added": [],
            "removed": [],
            "changed": {"north-america": {"max_kv_bytes": {"from": None, "to": 234_567_890_123}}},
        },
        "rules": {"added": [], "removed": [], "changed": {"nonce": {"first": {"from": False, "to": True}}}},
        "needs_restart": {"server.port": {"from": 8000, "to": 9000}},
    },
}
