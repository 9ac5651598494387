"""
Production traces without text: Mooncake's block hashes, Azure's lengths.

A Mooncake row has one hash id per block of 512 tokens, each id standing for the block *and* what comes before
it; equal ids are equal tokens. Neither users nor conversations are named, and a known first block may be any
system prompt: who asked, and at which turn, is unknown. Azure's rows have lengths only: a load shape, in
which nothing can be a hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.row import LoggedRow, Place
from kvshare.replay.readers.unreadable import Reason, RowError
from kvshare.replay.requests import LoggedRequest

MOONCAKE_BLOCK_SIZE = 512


def matches_mooncake(row: Mapping[str, Any]) -> bool:
    return "hash_ids" in row and "input_length" in row


def convert_mooncake(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    hash_ids = row.get("hash_ids")
    if hash_ids is None:
        raise RowError(Reason.MISSING_FIELD)
    if not isinstance(hash_ids, list):
        raise RowError(Reason.WRONG_TYPE)
    hashes = tuple(fields.count(hash_id) for hash_id in hash_ids)
    num_tokens = fields.count(row.get("input_length"))
    if not num_tokens:
        raise RowError(Reason.EMPTY)
    if len(hashes) != -(-num_tokens // MOONCAKE_BLOCK_SIZE):
        raise RowError(Reason.WRONG_TYPE)  # the blocks and the length tell different stories
    milliseconds = row.get("timestamp")
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=place.name,
            time_s=None if milliseconds is None else fields.seconds(milliseconds) / 1e3,
            block_hashes=hashes,
            block_size=MOONCAKE_BLOCK_SIZE,
            num_tokens=num_tokens,
            num_answer_tokens=fields.optional_count(row, "output_length"),
        )
    )


def matches_lengths(row: Mapping[str, Any]) -> bool:
    return "ContextTokens" in row and "GeneratedTokens" in row


def convert_lengths(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=place.name,
            time_s=fields.time_s(row.get("TIMESTAMP")),
            num_tokens=fields.count(row.get("ContextTokens")),
            num_answer_tokens=fields.count(row.get("GeneratedTokens")),
        )
    )
