"""Bodies of all four generating routes, and what answers them."""

from __future__ import annotations

from typing import Any

from tests.fake_streams import EVENTS
from tests.fake_vllm import MODEL
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import FORM, Relay

PATHS = tuple(EVENTS)
TOOL = {"name": "look_up", "description": "Finds a place.", "input_schema": {"type": "object"}}


def body_of(path: str, place: str, **extra: Any) -> dict[str, Any]:
    """The form everybody fills in, as this route takes it."""
    text = FORM.format(place=place)
    turns = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turns},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"instructions": "Be brief.", "input": text, "tools": [TOOL]},
        "/v1/messages": {"max_tokens": 9, "system": "Be brief.", "messages": turns, "tools": [TOOL]},
    }
    return {"model": MODEL, **bodies[path], **extra}


async def ask(relay: Relay, path: str, place: str, **extra: Any) -> Any:
    """What was asked is stored, or known not to be, when this returns."""
    response = await relay.send(path, body_of(path, place, **extra))
    await eventually(lambda: not relay.engine.server.in_flight._by_ticket_id)
    return response
