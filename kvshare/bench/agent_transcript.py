"""
A coding agent's session, made by rule: the bodies that its harness sends to `/v1/messages`, turn by turn.

It does what harnesses do to the front and the middle of their prompts: a nonce at token 40, a clock in the
system prompt, thoughts that are stripped from the history, results that are read again.

    system   guide line, billing line with a nonce of this turn, clock of this turn, the guide's rules
    user     the task
    assistant  a thought (only in the last turn before this one) and a call of a tool
    user       its result; now and then one number in an earlier result has changed
    ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

# What takes the nonce and the clock out of the way, as config.yaml writes it.
RULES: tuple[dict[str, Any], ...] = (
    {"name": "billing-nonce", "match": r"cch=[0-9a-f]+;", "action": "pin", "value": "cch=0;"},
    {"name": "clock", "match": r"Current time: .*", "action": "move"},
)

TOOLS: tuple[Body, ...] = (
    {
        "name": "read_file",
        "description": "Read a file of the project.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 60}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
    {
        "name": "run_tests",
        "description": "Run the tests of one module.",
        "input_schema": {
            "type": "object",
            "properties": {"module": {"type": "string", "maxLength": 40}},
            "required": ["module"],
            "additionalProperties": False,
        },
    },
)

_MODULES = ("invoices", "customers", "shipping", "stock", "prices", "returns", "taxes", "reports")
_THINGS = ("total", "weight", "discount", "margin", "volume", "distance", "balance", "quota")
_DUTIES = (
    "names every variable after what it holds",
    "raises ValueError for a negative amount",
    "keeps money in cents and never in floats",
    "has a test for its smallest and its largest input",
)
_FUNCTIONS = 4  # of a file
_CHANGES = 0.3  # of the turns, in which an earlier result is read anew


@dataclass
class AgentSession:
    """One session of `num_turns` requests, whose system prompt has `num_rules`. A seed makes the same one."""

    seed: int
    num_turns: int = 20
    num_rules: int = 60
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def requests(self) -> Iterator[Body]:
        """The `system`, `messages` and `tools` of each turn's body, the first one's first."""
        draw, results = self._draw, [self._file(number) for number in range(self.num_turns)]
        guide = self._guide()
        for turn in range(self.num_turns):
            if turn > 1 and draw.random() < _CHANGES:
                changed = draw.randrange(turn)
                results[changed] = self._refigured(results[changed])
            yield {
                "system": self._system(guide, turn),
                "messages": self._messages(results, turn),
                "tools": list(TOOLS),
            }

    def _system(self, guide: str, turn: int) -> str:
        seconds = 37 * turn + self._draw.randrange(30)
        return (
            "You are a careful programmer. You work in one project, call one tool at a time, and read "
            "what it answers before you go on.\n"
            f"x-agent-billing: version=2; cch={self._draw.getrandbits(32):08x}; tier=team\n"
            f"Current time: 2026-11-23 15:{seconds // 60:02d}:{seconds % 60:02d}\n\n{guide}"
        )

    def _guide(self) -> str:
        draw = self._draw
        rules = (
            f"Rule {number}. A function of `{draw.choice(_MODULES)}` that computes a {draw.choice(_THINGS)} "
            f"{draw.choice(_DUTIES)}; the limit is {draw.randrange(10, 9000)}."
            for number in range(1, self.num_rules + 1)
        )
        return "The project's rules:\n" + "\n".join(rules)

    def _messages(self, results: list[str], turn: int) -> list[Body]:
        messages: list[Body] = [
            {"role": "user", "content": "The totals of two reports differ. Find the module that is wrong."}
        ]
        for step in range(turn):
            path = _path(step)
            said = f"The next file to read is {path}."
            if step == turn - 1:
                thought = f"Rule {1 + step} may be broken in {path}, so its limit counts."
                said = f"<think>\n{thought}\n</think>\n{said}"
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
            f"def {thing}_{number}(amount: int) -> int:\n    return amount * {draw.randrange(2, 90)} "
            f"+ {draw.randrange(10, 9000)}\n"
            for thing in draw.sample(_THINGS, _FUNCTIONS)
        )
        return f"# {_path(number)}\n" + "\n".join(functions)

    def _refigured(self, result: str) -> str:
        """With another number in its first function."""
        head, plus, rest = result.partition("+ ")
        _, line_end, tail = rest.partition("\n")
        return f"{head}{plus}{self._draw.randrange(10, 9000)}{line_end}{tail}"


def _path(number: int) -> str:
    return f"project/{_MODULES[number % len(_MODULES)]}/part_{number}.py"
