"""A vLLM's description of itself and its connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvshare.vllm_protocol.json_fields import Flag, Message, Number, Text
from kvshare.vllm_protocol.messages import PROTOCOL, budget_of
from kvshare.vllm_protocol.places import DiskProblem


@dataclass(frozen=True, slots=True)
class ReplicaInfo(Message):
    """`GET /info`: the abilities and the KV layout of a vLLM with the connector."""

    epoch: Text
    model: Text
    versions: Mapping[str, str]  # vllm, kvshare, torch
    refusals: tuple[str, ...]  # why this replica cannot share; empty if it can
    warnings: tuple[str, ...]  # problems that do not prevent sharing
    can_move_keys: Flag
    namespace_fields: Mapping[str, str]  # model, revision, tokenizer, dtype, kv_layout, rope
    bytes_per_token: Number
    max_bytes: Number
    num_bytes: Number
    num_segments: Number
    max_model_len: Number
    fingerprint: str = ""  # of the model, to find its calibration
    can_choose: Flag = True  # whether it can choose repairs after a probe pass
    settings: Mapping[str, Any] = field(default_factory=dict)  # what `kvshare doctor` compares
    data_parallel_rank: Number | None = None  # of this engine, where a vLLM has several
    data_parallel_size: Number = 1  # number of engines of that vLLM, as reported by it
    device: str = ""  # of its ranks, in words
    max_disk_bytes: Number = 0  # or in a shared store; 0: KV is in memory only, and lost with the process
    num_disk_segments: Number = 0
    disk_problem: DiskProblem = field(default_factory=DiskProblem)  # of now; changes come by the journal
    speculation: str = ""  # vLLM's name of the method of speculative decoding, where it is on
    can_share_media: Flag = False  # images in prompts: positions are those of tokens
    shared_store: str = ""  # names the store that it shares with other vLLMs; empty: none
    has_own_disk: Flag = False  # whatever it shares
    is_listing: Flag = False  # it has not found yet all that it may have in the store
    passing: str = ""  # why requests pass unshared, though nothing is wrong

    _protocol = PROTOCOL
    _optional = frozenset(
        {"fingerprint", "can_choose", "settings", "data_parallel_rank", "data_parallel_size", "device"}
        | {"max_disk_bytes", "num_disk_segments", "speculation", "passing", "can_share_media"}
        | {"disk_problem", "shared_store", "has_own_disk", "is_listing"}
    )

    @property
    def shares(self) -> bool:
        return not (self.refusals or self.passing)

    @property
    def has_eight_bits(self) -> bool:
        return self.namespace_fields.get("dtype", "").startswith("float8")

    @property
    def budget_bytes(self) -> int:
        """Return how much of that the proxy uses, see `budget_of`."""
        return budget_of(self.most_bytes)

    @property
    def most_bytes(self) -> int:
        """Return the most bytes it may hold: in memory, or on its disk, which also has what is in memory."""
        return max(self.max_bytes, self.max_disk_bytes)
