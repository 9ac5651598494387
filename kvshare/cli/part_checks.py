"""`kvshare doctor` on the parts of a running server: which are not well, since when, and what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvshare.cli.check import Check, Checked
from kvshare.cli.client import AdminClient
from kvshare.errors import KVShareError

_TIMEOUT_S = 3.0


def check_parts(url: str, key: str | None) -> list[Check]:
    """Check the parts that the server lists; none if it does not answer, which another check says."""
    try:
        document = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).status()
        listed = document["parts"]
        well = Checked.PART.ok(f"all {len(listed)} parts of {url} are well")
        return [_problem(part) for part in listed if part["state"] != "ok"] or [well]
    except (KVShareError, KeyError, TypeError):
        return []


def _problem(part: Mapping[str, Any]) -> Check:
    label = " ".join(filter(None, [part["part"], part.get("name")]))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["since"]))
    is_off = " is off" if part["state"] == "off" else ","
    return Checked.PART.warn(f"{label}{is_off} since {since}: {part['detail']}", part["remedy"])
