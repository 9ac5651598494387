"""Documents of what `kvshare usage`, `tenants` and `config` show, as wide as they get."""

from typing import Any

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
TENANT_VIEWS: dict[str, Any] = {
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
        "keys": {"added": ["chatbot-1"], "removed": [], "changed": []},
        "tenants": {"added": [], "removed": [], "changed": ["north-america"]},
        "needs_restart": ["server.port"],
    },
}
