"""
Keeps formats of answers from vLLM that would end or choke it: they are compiled here first, where that costs
one request (`kvshare.grammar_pool`).

What has compiled once is remembered, as clients send the same schema or list of tools with each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvshare.conversation.schema_ends import NO_END, can_end
from kvshare.errors import UnsupportedFormatError
from kvshare.fleet.replica import Fleet
from kvshare.grammar_pool.pool import GrammarPool
from kvshare.grammar_pool.vllm_formats import has_xgrammar

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 8192
_MAX_CHARS = 2**20  # of all formats of a request
_DEFAULT_BACKEND = "auto"  # of a vLLM whose connector does not say


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One thing that an answer may have to follow, in vLLM's words."""

    kind: str  # json, regex, choice, grammar, structural_tag
    text: str
    param: str  # where in the request it is


class FormatGuard:
    """Checks formats before they are sent to any replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pool = GrammarPool(lambda: {"kind": "vllm"})
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        if not has_xgrammar():
            log.warning("xgrammar is not installed here: formats of answers are tried with llguidance only")

    def close(self) -> None:
        self._pool.close()

    async def check(self, formats: Sequence[AnswerFormat], *, key: str) -> None:
        """
        Return if vLLM may have them. `key`: whose they are.

        Raises:  UnsupportedFormatError for what would end it or occupy it for seconds, and for schemas
                 without a finite answer; OverloadedError if too many formats of this key are compiled
        """
        backends = sorted(
            {
                str(replica.info.settings.get("structured_outputs_backend") or _DEFAULT_BACKEND)
                for replica in self._fleet.replicas
                if replica.info is not None
            }
            or {_DEFAULT_BACKEND}
        )
        digest = _digest(formats, backends)
        if digest in self._passed:
            self._passed.move_to_end(digest)
            return
        await asyncio.to_thread(_check_values, formats)
        pairs = list(dict.fromkeys((each.kind, each.text) for each in formats))
        request = {"formats": pairs, "backends": backends}
        matcher, _ = await self._pool.compiled(request, key=key, param=formats[0].param)
        matcher.close()
        self._passed[digest] = None
        while len(self._passed) > _MAX_REMEMBERED:
            self._passed.popitem(last=False)


def _digest(formats: Sequence[AnswerFormat], backends: Sequence[str]) -> bytes:
    """Hash all formats of a request together, as vLLM makes one schema of its tools."""
    parts = json.dumps([sorted({(each.kind, each.text) for each in formats}), backends]).encode()
    return hashlib.sha256(parts).digest()


def _check_values(formats: Sequence[AnswerFormat]) -> None:
    """Check what can be seen without compiling. Raises UnsupportedFormatError."""
    size = sum(len(answer_format.text) for answer_format in formats)
    if size > _MAX_CHARS:
        reason = f"the formats of this request have {size} characters, expected at most {_MAX_CHARS}"
        raise UnsupportedFormatError(reason, formats[0].param)
    for answer_format in formats:
        if answer_format.kind == "json":
            schema = json.loads(answer_format.text)
            if isinstance(schema, dict) and not can_end(schema):
                raise UnsupportedFormatError(NO_END, answer_format.param)
