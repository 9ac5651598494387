"""
What schemathesis, which loads this file, changes about the bodies that it makes.

By chance no made-up body names the served model, and one that does asks for thousands of tokens: half of them
name it here, and all ask for few tokens.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

_FEW = 4
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook  # type: ignore[untyped-decorator]  # it lives in an environment of its own
def map_body(context: Any, body: Any) -> Any:
    """One body, wrong or right, as it is sent."""
    if not isinstance(body, dict):
        return body
    if len(str(body)) % 2:
        body["model"] = os.environ["FUZZ_MODEL"]
    for name in _LIMITS:
        if name in body or name == _LIMITS[0]:
            limit = body.get(name)
            is_long = limit is None or (isinstance(limit, int | float) and limit > _FEW)
            body[name] = _FEW if is_long else limit
    return body
