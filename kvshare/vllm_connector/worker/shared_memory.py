"""
Host memory that all ranks of an engine see: each has its heads of a segment there, together they are whole.

What is stored does not depend on the number of ranks then, and one reader can hand on all of it.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import torch

from kvshare.vllm_connector.worker.ranks import agreed, num_ranks, rank

log = logging.getLogger("vllm.kvshare")

_FOLDER = Path("/dev/shm")


def shared_by_ranks(num_bytes: int, name: str) -> torch.Tensor | None:
    """
    So many bytes, reserved now, the same on every rank; None with a single one, and where they cannot be had.

    All ranks call it together. `name` is the engine's alone.
    """
    if num_ranks() == 1:
        return None
    path, buffer = _FOLDER / f"kvshare-{name}", None
    if rank() == 0:
        buffer = _mapped(path, num_bytes, creates=True)
    has_first = all(agreed([rank() != 0 or buffer is not None]))
    if has_first and rank() != 0:
        buffer = _mapped(path, num_bytes, creates=False)
    have_all = all(agreed([buffer is not None]))
    if rank() == 0:
        path.unlink(missing_ok=True)
    return buffer if have_all else None


def _mapped(path: Path, num_bytes: int, *, creates: bool) -> torch.Tensor | None:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            if creates:
                # Reserved at once: memory that is not there when it is written ends the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except OSError as exc:
        log.warning(
            "kvshare: %d bytes of shared memory cannot be had (%s): each rank keeps its own part. A larger "
            "%s (docker run --shm-size) changes that",
            num_bytes,
            exc.strerror or exc,
            _FOLDER,
        )
        return None
