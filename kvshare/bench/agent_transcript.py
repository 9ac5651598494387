"""
A coding agent's session by rule: the bodies that its harness sends to `/v1/messages`, turn by turn.

It changes the front and the middle of its prompts as harnesses do: a nonce at token 40, a clock in the system
prompt, thoughts that are removed from the history, results that are read again.

    system     what to do, a billing line with a nonce of this turn, the time of this turn, the guide's rules
    user       the task
    assistant  a thought (only in the last turn before this one) and a call of a tool
    user       its result; now and then one number in an earlier result has changed
    ...

The texts are in agent_transcript.yaml.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Body = dict[str, Any]

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES: Sequence[dict[str, Any]] = _TEXTS["rules"]
_FUNCTIONS = 4  # of a file
_CHANGES = 0.3  # share of the turns in which an earlier result has changed


@dataclass
class AgentSession:
    """One session of `num_turns` requests, whose system prompt has `num_rules`. A seed gives the same one."""

    seed: int
    num_turns: int = 20
    num_rules: int = 60
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def requests(self) -> Iterator[Body]:
        """The `system`, `messages` and `tools` of each turn's body, the first turn's first."""
        draw, results = self._draw, [self._file(number) for number in range(self.num_turns)]
        guide = "\n".join(self._rule(number) for number in range(1, self.num_rules + 1))
        for turn in range(self.num_turns):
            if turn > 1 and draw.random() < _CHANGES:
                changed = draw.randrange(turn)
                results[changed] = self._changed(results[changed])
            minutes, seconds = divmod(37 * turn + draw.randrange(30), 60)
            front = {"nonce": draw.getrandbits(32), "minutes": minutes, "seconds": seconds, "guide": guide}
            yield {
                "system": _TEXTS["system"].format(**front),
                "messages": self._messages(results, turn),
                "tools": _TEXTS["tools"],
            }

    def _rule(self, number: int) -> str:
        draw = self._draw
        drawn = {name: draw.choice(_TEXTS[f"{name}s"]) for name in ("module", "thing")}
        duty = draw.choice(_TEXTS["duties"])
        return str(_TEXTS["rule"]).format(number=number, **drawn, duty=duty, limit=draw.randrange(10, 9000))

    def _messages(self, results: list[str], turn: int) -> list[Body]:
        messages: list[Body] = [{"role": "user", "content": _TEXTS["task"]}]
        for step in range(turn):
            path = _path(step)
            said = _TEXTS["said"].format(path=path)
            if step == turn - 1:
                said = _TEXTS["thought"].format(number=1 + step, path=path) + said
            call_id = f"toolu_{self.seed:04d}_{step:04d}"
            call = {"type": "tool_use", "id": call_id, "name": "read_file", "input": {"path": path}}
            result = {"type": "tool_result", "tool_use_id": call_id, "content": results[step]}
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": said}, call]},
                {"role": "user", "content": [result]},
            ]
        return messages

    def _file(self, number: int) -> str:
        draw = self._draw
        functions = (
            _TEXTS["function"].format(
                thing=thing, file=number, factor=draw.randrange(2, 90), added=draw.randrange(10, 9000)
            )
            for thing in draw.sample(_TEXTS["things"], _FUNCTIONS)
        )
        return f"# {_path(number)}\n" + "\n".join(functions)

    def _changed(self, result: str) -> str:
        """The same file with another number in its first function."""
        head, plus, rest = result.partition("+ ")
        _, line_end, tail = rest.partition("\n")
        return f"{head}{plus}{self._draw.randrange(10, 9000)}{line_end}{tail}"


def _path(number: int) -> str:
    modules = _TEXTS["modules"]
    return f"project/{modules[number % len(modules)]}/part_{number}.py"
