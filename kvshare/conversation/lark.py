"""Writes a grammar in llguidance's Lark dialect, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# JSON on one line: where any white space may stand, a model can write it without end.
_ONE_LINE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}


class LarkGrammar:
    """
    Rules and terminals so far. Each method returns an expression: what a rule may be made of.

    A text that the tokenizer has as one added token is that token in the grammar: llguidance matches such
    tokens by their ids only, never by their text.
    """

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._added_tokens = added_tokens
        self._lines = ["ANY: /(?s:.*)/"]

    def start(self, expression: str) -> str:
        """The whole grammar, of answers that are `expression`."""
        return "\n".join([f"start: {expression}", *self._lines, ""])

    def is_token(self, text: str) -> bool:
        return text in self._added_tokens

    def literal(self, text: str) -> str:
        return f"<[{self._added_tokens[text]}]>" if self.is_token(text) else quoted(text)

    def rule(self, expression: str) -> str:
        return self._named("rule", expression)

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """
        JSON of this schema.

        `lenient`: what llguidance does not know of schemas is passed over. Else the grammar does not compile.
        """
        options = {**_ONE_LINE, "lenient": lenient}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")

    def text_without(self, texts: Sequence[str], *, first_not: str = "") -> str:
        """Text that has none of `texts` in it; `first_not`: a character that it does not begin with."""
        text = rf"/\s*([^\s{re.escape(first_not)}](?s:.*))?/" if first_not else "ANY"
        return self._named("TEXT", _without(text, texts))

    def text_until(self, end: str, *, without: Sequence[str] = ()) -> str:
        """Text up to the first `end`, and `end`."""
        others = [text for text in without if text != end]
        if self.is_token(end):
            return f"{self.text_without([*others, end])} {self.literal(end)}"
        return self._named("text[lazy]", self._named("TEXT", _without(f"ANY {quoted(end)}", others)))

    def _named(self, name: str, expression: str) -> str:
        base, bracket, options = name.partition("[")
        numbered = f"{base}_{len(self._lines)}"
        self._lines.append(f"{numbered}{bracket}{options}: {expression}")
        return numbered


def any_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(expression: str, texts: Sequence[str]) -> str:
    return f"{expression} & ~(ANY {any_of(map(quoted, texts))} ANY)" if texts else expression
