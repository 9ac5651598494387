"""
`kvshare bench agents`: a coding agent's session through `/v1/messages`, whose front changes with every turn.

Each turn is sent to the model in three ways, over a loopback socket:

    full         nothing is shared
    edits        default settings; the equal prefix among what is reused is what a prefix cache would have
    rules        default settings, with rules that pin the nonce and move the clock (config.yaml: `rules`)

Each way has a server of its own, so that none finds another's KV. The tool calls of `edits` and `rules` are
compared with those of full prefills of the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.bench.agent_transcript import RULES, AgentSession, Body
from kvshare.bench.front import Client, serving
from kvshare.bench.harness import environment
from kvshare.errors import EngineError

_CALL_TOKENS = 48  # at most, of the tool call that each turn asks for
_REFUSED = "deviates_too_much"  # why the gate allowed no more than the prefix


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request."""

    prompt_tokens: int
    exact: int  # tokens of an equal prefix
    reused: int
    decision: str
    reason: str | None
    call: Mapping[str, Any] | None  # name and input of the tool that was called


async def run(*, model: str = "default", turns: int = 20, guide: int = 60, seed: int = 0) -> dict[str, Any]:
    """
    One session of `turns` requests in every way; its system prompt has a `guide` of so many rules.

    Raises:  ModelError; EngineError for a failed request
    """
    requests = list(AgentSession(seed, turns, guide).requests())
    ways: dict[str, Sequence[Mapping[str, Any]]] = {"edits": (), "rules": RULES}
    full = {way: await _served(model, requests, "off", rules) for way, rules in ways.items()}
    shared = {way: await _served(model, requests, "approx", rules) for way, rules in ways.items()}
    first, *_, last = full["edits"]
    return {
        "prompt_tokens": {"first": first.prompt_tokens, "last": last.prompt_tokens},
        **{
            way: {**_shared(shared[way]), "equal_calls": _equal_calls(shared[way], full[way])} for way in ways
        },
        "environment": environment(),
    }


async def _served(
    model: str, requests: Sequence[Body], mode: str, rules: Sequence[Mapping[str, Any]]
) -> list[Turn]:
    """The turns, on a new server."""
    turns = []
    async with serving({"model.path": model, "rules": list(rules)}) as (client, engine):
        for body in requests:
            turns.append(await _send(client, engine.card.model_id, body, mode))
            await engine.settle()
    return turns


async def _send(client: Client, model: str, body: Body, mode: str) -> Turn:
    """Raises EngineError unless it is answered."""
    sharing = {"mode": mode, "no_store": mode == "off"}
    sent = {**body, "model": model, "max_tokens": _CALL_TOKENS, "temperature": 0, "kvshare": sharing}
    sent["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    async with client.post("/v1/messages", json=sent) as response:
        document = await response.json()
    if response.status != 200:
        message = document["error"]["message"]
        raise EngineError(f"a turn was answered with HTTP {response.status}, expected 200: {message}")
    shared = document["usage"]["kvshare"]
    calls = [block for block in document["content"] if block["type"] == "tool_use"]
    return Turn(
        prompt_tokens=sum(shared[part] for part in ("exact", "copied", "recomputed", "repaired")),
        exact=shared["exact"],
        reused=shared["exact"] + shared["copied"],
        decision=shared["decision"],
        reason=shared["reason"],
        call={"name": calls[0]["name"], "input": calls[0]["input"]} if calls else None,
    )


def _shared(turns: Sequence[Turn]) -> dict[str, Any]:
    """
    Shares of prompt tokens, over all turns but the first, which has no donor.

    `refused`: in turns whose expected deviation allowed nothing but the prefix. `reused_where_allowed`:
    reused in the other turns.
    """
    later = turns[1:]
    allowed = [turn for turn in later if turn.reason != _REFUSED]
    num_tokens = max(1, sum(turn.prompt_tokens for turn in later))
    num_allowed = sum(turn.prompt_tokens for turn in allowed)
    return {
        "equal_prefix": sum(turn.exact for turn in later) / num_tokens,
        "reused": sum(turn.reused for turn in later) / num_tokens,
        "reused_where_allowed": sum(turn.reused for turn in allowed) / max(1, num_allowed),
        "refused": 1 - num_allowed / num_tokens,
        "decisions": [turn.decision for turn in turns],
        "reasons": sorted({turn.reason for turn in later if turn.reason is not None}),
    }


def _equal_calls(turns: Sequence[Turn], full: Sequence[Turn]) -> float:
    """Share of turns that call the same tool with the same arguments as the full prefill does."""
    pairs = list(zip(turns, full, strict=True))
    return sum(shared.call == computed.call for shared, computed in pairs) / len(pairs)
