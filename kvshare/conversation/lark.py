"""Writes a grammar in the Lark dialect of llguidance, rule by rule."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.conversation.schema_ends import NO_END, can_end
from kvshare.conversation.schema_ids import has_equal_ids
from kvshare.conversation.schema_numbers import UnsupportedNumberError, with_exact_numbers
from kvshare.errors import UnsupportedFormatError
from kvshare.grammar_pool.limits import MAX_CHARS

# JSON on one line: if any white space were allowed, a model could write it endlessly.
_ONE_LINE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar for answers, in llguidance's Lark dialect. `param`: the request's field that asks for it."""

    lark: str
    param: str = "response_format"


class LarkGrammar:
    """
    A grammar that is being written. Each method returns an expression to build rules from.

    In `literal` and `text_until` a text becomes the added token of that text, if there is one: llguidance
    matches added tokens by id only, never by text.
    """

    def __init__(self, added_tokens: Mapping[str, int], *, param: str) -> None:
        """`param`: as in `Grammar`."""
        self._added_tokens = added_tokens
        self._param = param
        self._lines = ["ANY: /(?s:.*)/"]

    def start(self, expression: str) -> Grammar:
        return Grammar("\n".join([f"start: {expression}", *self._lines, ""]), self._param)

    def is_token(self, text: str) -> bool:
        return text in self._added_tokens

    def literal(self, text: str) -> str:
        return f"<[{self._added_tokens[text]}]>" if self.is_token(text) else quoted(text)

    def rule(self, expression: str) -> str:
        return self._named("rule", expression)

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """
        JSON of this schema.

        `lenient`: ignore keywords of schemas that llguidance does not support. Else they do not compile.

        Raises:  UnsupportedFormatError if it is too large, a number cannot be kept, or no answer can end
        """
        size = len(json.dumps(schema, ensure_ascii=False))
        if size > MAX_CHARS:
            reason = f"it has {size} characters, expected at most {MAX_CHARS}"
            raise UnsupportedFormatError(reason, self._param)
        try:
            exact = with_exact_numbers(schema)
        except UnsupportedNumberError as exc:
            raise UnsupportedFormatError(str(exc), self._param) from exc
        if not can_end(exact):
            raise UnsupportedFormatError(NO_END, self._param)
        if has_equal_ids(exact):
            raise UnsupportedFormatError("two of its schemas have the same $id", self._param)
        options = {**_ONE_LINE, "lenient": lenient}
        return self.rule(f"%json {json.dumps({**exact, 'x-guidance': options}, ensure_ascii=False)}")

    def text_without(self, texts: Sequence[str], *, first_not: str = "") -> str:
        """Text that contains none of `texts`, and whose first visible character is not `first_not`."""
        text = rf"/\s*([^\s{re.escape(first_not)}](?s:.*))?/" if first_not else "ANY"
        return self._named("TEXT", _without(text, texts))

    def text_until(self, end: str, *, without: Sequence[str] = ()) -> str:
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
