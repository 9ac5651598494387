"""
By which a proxy knows what a connector holds, and from where a segment would be copied. Events are estimates,
which may be late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvshare.vllm_protocol.json_fields import Flag, Held, Message, Number, Text

READ_PARTS = 4  # of a load from disk, each of which is copied while the next one is read


@dataclass(frozen=True, slots=True)
class Moved(Message):
    """
    Segments that `came` to lie in vLLM's own blocks, and those that `left` them before.

    Those that are dropped have left them, too.
    """

    came: tuple[Held, ...]
    left: tuple[Held, ...] = ()
    kind: Literal["moved"] = "moved"


@dataclass(frozen=True, slots=True)
class OnDiskOnly(Message):
    """
    Segments that `came` to be on disk only, and those that `left` it: they are in host memory, too.

    `num_bytes`: of each that came and was not held before, as another vLLM has written it to a shared store;
    empty for the others.
    """

    came: tuple[Held, ...] = ()
    left: tuple[Held, ...] = ()
    num_bytes: tuple[Number, ...] = ()
    kind: Literal["on_disk"] = "on_disk"

    _optional = frozenset({"num_bytes"})


@dataclass(frozen=True, slots=True)
class DiskProblem(Message):
    """
    The reason why nothing is written to the connector's disk. An empty `reason`: it is written (again).

    `is_lasting`: until vLLM is started again.
    """

    reason: str = ""
    is_lasting: Flag = False
    kind: Literal["disk_problem"] = "disk_problem"


@dataclass(frozen=True, slots=True)
class HeldSegments(Message):
    """
    `GET /segments`: the segments that a connector holds after event `last` of its journal, in memory or on
    disk. `on_disk`: those that are on disk only.
    """

    epoch: Text
    last: Number
    segment_ids: tuple[Held, ...]
    on_disk: tuple[Held, ...] = ()

    _optional = frozenset({"on_disk"})
