"""
Host memory that all ranks of an engine share: each rank writes its own heads of a segment there.

So the stored bytes do not depend on the number of ranks, and one reader can read whole segments.
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
    Reserve `num_bytes` that all ranks share. None with a single rank, and if they cannot be reserved.

    All ranks call it together. `name` is unique to the engine.
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
                # Reserved now: running out of memory at a later write would end the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except OSError as exc:
        log.warning(
            "kvshare: %d bytes of shared memory cannot be reserved (%s): each rank stores its own part. "
            "Enlarge %s (docker run --shm-size) to share it",
            num_bytes,
            exc.strerror or exc,
            _FOLDER,
        )
        return None
