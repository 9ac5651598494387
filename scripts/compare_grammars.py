"""
Libraries that hold an answer to a JSON schema, compared on one tokenizer: docs/decisions/0006.

    .venv/bin/python scripts/compare_grammars.py TOKENIZER_FOLDER > compared.json

Needs `pip install llguidance xgrammar outlines_core`, of which KVShare itself needs only the first. Each
library runs in a process of its own, and has a minute for each schema.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llguidance
import llguidance.torch
import numpy as np
import outlines_core
import torch
import typer
import xgrammar
from outlines_core.json_schema import build_regex_from_schema
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvshare.engines.embedded.text import token_text

LIMIT_S = 60.0
_LOST = (f"not within {LIMIT_S:.0f} s", "died")
REPEATS = 5
TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}

Schema = dict[str, Any]


def closed(**properties: Any) -> Schema:
    """An object with these properties and no others, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def tool(number: int) -> Schema:
    """One of many tools, each with required and optional arguments, as a coding agent has them."""
    arguments = closed(
        path=TEXT, mode={"enum": ["read", "write", "append"]}, lines={"type": "array", "items": WHOLE}
    )
    arguments["properties"] |= {f"option_{name}": {"anyOf": [TEXT, NUMBER]} for name in "abcd"}
    return closed(name={"const": f"tool_{number}"}, arguments=arguments)


NESTED = closed(
    title=TEXT,
    state={"enum": ["open", "closed", "waiting"]},
    people={"type": "array", "items": closed(name=TEXT, age=WHOLE), "minItems": 1, "maxItems": 8},
    place={"anyOf": [closed(city=TEXT, code={"type": "string", "pattern": "^[0-9]{5}$"}), {"type": "null"}]},
    due={"type": "string", "format": "date"},
)
TIMED: dict[str, tuple[Schema, Any]] = {
    "small": (closed(name=TEXT, age=WHOLE), {"name": "Ann Larsen", "age": 41}),
    "nested": (
        NESTED,
        {
            "title": "Bridge inspection at Østerbro",
            "state": "waiting",
            "people": [{"name": "Ann", "age": 41}, {"name": "Bob", "age": 7}],
            "place": {"city": "Bergen", "code": "50031"},
            "due": "2026-11-23",
        },
    ),
    "20 tools": (
        {"anyOf": [tool(number) for number in range(20)]},
        {
            "name": "tool_13",
            "arguments": {
                "path": "/srv/data/report.txt",
                "mode": "append",
                "lines": [3, 14, 159],
                "option_b": 2.5,
            },
        },
    ),
}
ANY_OF = {"anyOf": [WHOLE, {"type": "boolean"}]}
# What a schema says, an answer that follows it, and one that does not.
KEYWORDS: dict[str, tuple[Schema, Any, Any]] = {
    "type": (WHOLE, 3, "three"),
    "types": ({"type": ["integer", "null"]}, None, "none"),
    "enum": ({"enum": ["a", 2]}, 2, 3),
    "const": ({"const": "yes"}, "yes", "no"),
    "anyOf": (ANY_OF, True, "true"),
    "oneOf": ({"oneOf": [WHOLE, TEXT]}, 3, True),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 6, 4),
    "$ref": ({"$defs": {"age": WHOLE}, **closed(age={"$ref": "#/$defs/age"})}, {"age": 3}, {"age": "3"}),
    "$ref, recursive": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        {"next": {"next": {}}},
        {"next": {"next": 1}},
    ),
    "optional properties": (
        {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "additionalProperties": False},
        {"b": 2},
        {"c": 2},
    ),
    "required": ({**closed(a=WHOLE, b=WHOLE), "required": ["a"]}, {"a": 1}, {"b": 1}),
    "additionalProperties": ({"type": "object", "additionalProperties": WHOLE}, {"x": 1}, {"x": "1"}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": WHOLE}, "additionalProperties": False},
        {"n_a": 1},
        {"m_a": 1},
    ),
    "minProperties": (
        {"type": "object", "additionalProperties": WHOLE, "minProperties": 2},
        {"a": 1, "b": 2},
        {"a": 1},
    ),
    "items": ({"type": "array", "items": WHOLE}, [1, 2], [1, "2"]),
    "prefixItems": ({"type": "array", "prefixItems": [WHOLE, TEXT], "items": False}, [1, "a"], ["a", 1]),
    "minItems": ({"type": "array", "items": WHOLE, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "items": WHOLE, "maxItems": 2}, [1, 2], [1, 2, 3]),
    "uniqueItems": ({"type": "array", "items": WHOLE, "uniqueItems": True}, [1, 2], [1, 1]),
    "minLength": ({"type": "string", "minLength": 3}, "abc", "ab"),
    "maxLength": ({"type": "string", "maxLength": 3}, "abc", "abcd"),
    "pattern": ({"type": "string", "pattern": "^[a-f]+$"}, "cafe", "caff\u00e8"),
    "format: date": ({"type": "string", "format": "date"}, "2026-11-23", "23 Nov"),
    "format: uuid": ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "123"),
    "format: email": ({"type": "string", "format": "email"}, "ann@example.com", "ann"),
    "minimum": ({"type": "integer", "minimum": 10}, 11, 9),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1.5}, 1.4, 1.5),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 15, 16),
    "not": ({"not": TEXT}, 3, "a"),
    "if, then": ({"type": "integer", "if": {"minimum": 5}, "then": {"minimum": 10}}, 12, 7),
}


class Library(ABC):
    """One library on one tokenizer. Refusals of a schema are whatever it raises."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.mask = torch.zeros((1, (len(tokenizer) + 31) // 32), dtype=torch.int32)

    @abstractmethod
    def compile(self, schema: Schema) -> None: ...

    @abstractmethod
    def fill_mask(self) -> None:
        """Which tokens may come, one bit each."""

    @abstractmethod
    def take(self, token_id: int) -> None: ...

    def allows(self, token_id: int) -> bool:
        return bool(int(self.mask[0, token_id // 32]) >> token_id % 32 & 1)


class LLGuidance(Library):
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        text, eos = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=len(tokenizer), eos_token=eos)

    def compile(self, schema: Schema) -> None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        self._matcher = llguidance.LLMatcher(self._tokenizer, grammar)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def fill_mask(self) -> None:
        llguidance.torch.fill_next_token_bitmask(self._matcher, self.mask)

    def take(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class XGrammar(Library):
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> None:
        self._matcher = xgrammar.GrammarMatcher(self._compiler.compile_json_schema(schema))

    def fill_mask(self) -> None:
        if not self._matcher.fill_next_token_bitmask(self.mask):
            self.mask.fill_(-1)  # all are allowed

    def take(self, token_id: int) -> None:
        self._matcher.accept_token(token_id)


class OutlinesCore(Library):
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        special, eos = set(tokenizer.all_special_ids), tokenizer.eos_token_id
        ids: dict[bytes, list[int]] = {}
        for token_id in range(len(tokenizer)):
            if token_id not in special:
                ids.setdefault(token_text(tokenizer.backend_tokenizer, token_id)[1], []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(eos, ids)

    def compile(self, schema: Schema) -> None:
        regex = build_regex_from_schema(json.dumps(schema))
        self._guide = outlines_core.Guide(outlines_core.Index(regex, self._vocabulary))

    def fill_mask(self) -> None:
        self._guide.write_mask_into(self.mask.data_ptr(), self.mask.numel(), self.mask.element_size())

    def take(self, token_id: int) -> None:
        self._guide.advance(token_id, return_tokens=False)


LIBRARIES: dict[str, type[Library]] = {
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
    "outlines_core": OutlinesCore,
}


def follows(library: Library, token_ids: Sequence[int]) -> list[float] | None:
    """Seconds per mask along an answer and its end; None where one of its tokens is not allowed."""
    seconds = []
    for token_id in token_ids:
        began = time.perf_counter()
        library.fill_mask()
        seconds.append(time.perf_counter() - began)
        if not library.allows(token_id):
            return None
        if token_id != token_ids[-1]:  # the last one ends the answer
            library.take(token_id)
    return seconds


def timed(library: Library, schema: Schema, token_ids: Sequence[int]) -> dict[str, float]:
    """Milliseconds to compile, best of some, and microseconds per mask, all repeats together."""
    compiling, masks = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        library.compile(schema)
        compiling.append(time.perf_counter() - began)
        masks += follows(library, token_ids) or []
        if sum(compiling) > LIMIT_S / 4:
            break
    if not masks:
        raise ValueError("a valid answer is not allowed")
    mean, p99 = float(np.mean(masks)), float(np.percentile(masks, 99))
    return {
        "compile_ms": round(1e3 * min(compiling), 2),
        "mask_mean_us": round(1e6 * mean, 1),
        "mask_p99_us": round(1e6 * p99, 1),
        "mask_max_us": round(1e6 * max(masks), 1),
    }


def judged(library: Library, schema: Schema, right: Sequence[int], wrong: Sequence[int]) -> str:
    """Whether a keyword is enforced."""
    library.compile(schema)
    if follows(library, right) is None:
        return "refuses a valid answer"
    library.compile(schema)
    return "enforced" if follows(library, wrong) is None else "ignored"


def measure(name: str, folder: Path, cases: Sequence[str], answers: Connection) -> None:
    """One library and these cases, in a process of its own."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)

    def tokens(answer: Any) -> list[int]:
        # outlines_core takes at most one space, llguidance no trailing one: the common spelling.
        text = json.dumps(answer, ensure_ascii=False, separators=(", ", ": "))
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    library = LIBRARIES[name](tokenizer)
    for case in cases:
        try:
            if case in TIMED:
                schema, answer = TIMED[case]
                answers.send(timed(library, schema, tokens(answer)))
            else:
                schema, right, wrong = KEYWORDS[case]
                answers.send(judged(library, schema, tokens(right), tokens(wrong)))
        except Exception as exc:  # noqa: BLE001  each library has its own errors
            answers.send(f"refused: {type(exc).__name__}")


def measured(name: str, folder: Path) -> dict[str, Any]:
    """All cases of one library. One that takes too long costs a new process for those behind it."""
    cases, found, spawning = [*TIMED, *KEYWORDS], {}, get_context("spawn")
    while cases:
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=measure, args=(name, folder, cases, theirs))
        process.start()
        theirs.close()
        answer = None
        while cases and answer not in _LOST:
            try:
                answer = ours.recv() if ours.poll(LIMIT_S) else _LOST[0]
            except EOFError:
                answer = _LOST[1]
            found[cases.pop(0)] = answer
        process.kill()
        process.join()
    return found


def main(tokenizer: Path) -> None:
    """Compare on the tokenizer of a model's folder."""
    found = {name: {"version": version(name), **measured(name, tokenizer)} for name in LIBRARIES}
    typer.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
