"""
`kvshare bench agents`: a coding agent's session through `/v1/messages`, whose front changes with every turn.

The session is made by rule. It changes the front and the middle of its prompts as harnesses do:

    system     what to do, a billing line with a nonce of this turn, the time of this turn, the guide's rules
    user       the task
    assistant  a thought (only in the last turn before this one) and a call of a tool
    user       its result; now and then one number in an earlier result has changed
    ...

Each turn is sent to the model in three ways, over a loopback socket:

    full         nothing is shared
    edits        default settings; the equal prefix among what is reused is what a prefix cache would have
    rules        default settings, with rules that pin the nonce and move the clock (config.yaml: `rules`)

Each way has a server of its own, so that none finds another's KV. The tool calls of `edits` and `rules` are
compared with those of full prefills of the same prompts. The session's texts are in agents.yaml.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvshare.errors import EngineError
from kvshare_lab.bench.harness import environment, serving

Body = dict[str, Any]

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES: Sequence[dict[str, Any]] = _TEXTS["rules"]
_FUNCTIONS = 4  # of a file
_CHANGES = 0.3  # share of the turns in which an earlier result has changed
_CALL_TOKENS = 48  # at most, of the tool call that each turn asks for
_ANY_TOOL = {"type": "any", "disable_parallel_tool_use": True}
_REFUSED = "deviates_too_much"  # why the gate allowed no more than the prefix


class Turn(NamedTuple):
    prompt_tokens: int
    exact: int  # tokens of an equal prefix
    reused: int
    decision: str
    reason: str | None
    call: Mapping[str, Any] | None  # name and input of the tool that was called


async def run(*, model: str = "default", turns: int = 20, guide: int = 60, seed: int = 0) -> dict[str, Any]:
    """A session of `turns` requests, with a `guide` of so many rules, in every way. Raises EngineError."""
    requests = list(session(seed, turns, guide))
    ways: dict[str, Sequence[Mapping[str, Any]]] = {"edits": (), "rules": RULES}
    full = {way: await _served(model, requests, "off", rules) for way, rules in ways.items()}
    shared = {way: await _served(model, requests, "approx", rules) for way, rules in ways.items()}
    first, *_, last = full["edits"]
    return {
        "prompt_tokens": {"first": first.prompt_tokens, "last": last.prompt_tokens},
        **{way: _figures(shared[way], full[way]) for way in ways},
        "environment": environment(),
    }


async def _served(
    model: str, requests: Sequence[Body], mode: str, rules: Sequence[Mapping[str, Any]]
) -> list[Turn]:
    """The turns, on a new server. Raises EngineError unless all are answered."""
    turns, sharing = [], {"mode": mode, "no_store": mode == "off"}
    options = {"max_tokens": _CALL_TOKENS, "temperature": 0, "tool_choice": _ANY_TOOL, "kvshare": sharing}
    async with serving({"model.path": model, "rules": list(rules)}) as (client, engine):
        for request in requests:
            body = {**request, **options, "model": engine.card.model_id}
            async with client.post("/v1/messages", json=body) as response:
                document = await response.json()
            if response.status != 200:
                found = f"HTTP {response.status}, expected 200: {document['error']['message']}"
                raise EngineError(f"a turn was answered with {found}")
            turns.append(_turn(document))
            await engine.settle()
    return turns


def _turn(answer: Mapping[str, Any]) -> Turn:
    shared = answer["usage"]["kvshare"]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return Turn(
        prompt_tokens=sum(shared[part] for part in ("exact", "copied", "recomputed", "repaired")),
        exact=shared["exact"],
        reused=shared["exact"] + shared["copied"],
        decision=shared["decision"],
        reason=shared["reason"],
        call={"name": calls[0]["name"], "input": calls[0]["input"]} if calls else None,
    )


def _figures(turns: Sequence[Turn], full: Sequence[Turn]) -> dict[str, Any]:
    """
    Shares of prompt tokens, over all turns but the first, which has no donor.

    `refused`: in turns whose expected deviation allowed nothing but the prefix. `reused_where_allowed`:
    reused in the other turns. `equal_calls`: share of all turns that call the same tool with the same
    arguments as the full prefill does.
    """
    later = turns[1:]
    allowed = [turn for turn in later if turn.reason != _REFUSED]
    num_tokens = max(1, sum(turn.prompt_tokens for turn in later))
    num_allowed = sum(turn.prompt_tokens for turn in allowed)
    equal = [shared.call == computed.call for shared, computed in zip(turns, full, strict=True)]
    return {
        "equal_prefix": sum(turn.exact for turn in later) / num_tokens,
        "reused": sum(turn.reused for turn in later) / num_tokens,
        "reused_where_allowed": sum(turn.reused for turn in allowed) / max(1, num_allowed),
        "refused": 1 - num_allowed / num_tokens,
        "decisions": [turn.decision for turn in turns],
        "reasons": sorted({turn.reason for turn in later if turn.reason is not None}),
        "equal_calls": sum(equal) / len(equal),
    }


def session(seed: int, num_turns: int = 20, num_rules: int = 60) -> Iterator[Body]:
    """Each turn's `system`, `messages` and `tools`, with so many rules. A seed gives the same session."""
    draw = random.Random(seed)
    results = [_file(number, draw) for number in range(num_turns)]
    guide = "\n".join(_rule(number, draw) for number in range(1, num_rules + 1))
    for turn in range(num_turns):
        if turn > 1 and draw.random() < _CHANGES:
            changed = draw.randrange(turn)
            other_number = f"+ {draw.randrange(10, 9000)}"  # in its first function
            results[changed] = re.sub(r"\+ .*", other_number, results[changed], count=1)
        minutes, seconds = divmod(37 * turn + draw.randrange(30), 60)
        front = {"nonce": draw.getrandbits(32), "minutes": minutes, "seconds": seconds, "guide": guide}
        messages = [{"role": "user", "content": _TEXTS["task"]}]
        for step in range(turn):
            messages += _step(seed, step, results[step], is_last=step == turn - 1)
        yield {"system": _TEXTS["system"].format(**front), "messages": messages, "tools": _TEXTS["tools"]}


def _rule(number: int, draw: random.Random) -> str:
    drawn = {name: draw.choice(_TEXTS[f"{name}s"]) for name in ("module", "thing")}
    duty = draw.choice(_TEXTS["duties"])
    return str(_TEXTS["rule"]).format(number=number, **drawn, duty=duty, limit=draw.randrange(10, 9000))


def _step(seed: int, step: int, result: str, *, is_last: bool) -> list[Body]:
    """The assistant's message with its call, and the result."""
    path, call_id = _path(step), f"toolu_{seed:04d}_{step:04d}"
    thought = _TEXTS["thought"].format(number=1 + step, path=path) if is_last else ""
    said = {"type": "text", "text": thought + _TEXTS["said"].format(path=path)}
    call = {"type": "tool_use", "id": call_id, "name": "read_file", "input": {"path": path}}
    answer = {"type": "tool_result", "tool_use_id": call_id, "content": result}
    return [{"role": "assistant", "content": [said, call]}, {"role": "user", "content": [answer]}]


def _file(number: int, draw: random.Random) -> str:
    functions = (
        _TEXTS["function"].format(
            thing=thing, file=number, factor=draw.randrange(2, 90), added=draw.randrange(10, 9000)
        )
        for thing in draw.sample(_TEXTS["things"], _FUNCTIONS)
    )
    return f"# {_path(number)}\n" + "\n".join(functions)


def _path(number: int) -> str:
    modules = _TEXTS["modules"]
    return f"project/{modules[number % len(modules)]}/part_{number}.py"
