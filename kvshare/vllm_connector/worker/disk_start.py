"""
Opens what is below a worker's memory: a disk, with what an earlier process has left there, a store that other
vLLMs share, or both.

It needs the model: KV of other weights, or of another form, is never read. What cannot be used is left out,
and a warning says why.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm.config import VllmConfig

from delta_tree import Segment
from kvshare.errors import KVShareError
from kvshare.settings import SharedTierSettings
from kvshare.tiers import VLLM_KV_FOLDER
from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import HeadsFirstForm, ObjectForm
from kvshare.tiers.lower_tier import LowerTier
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.tiers.shared_tier import SharedTier
from kvshare.vllm_connector.config import ConnectorSettings, data_parallel_rank
from kvshare.vllm_connector.metadata import WorkerHandshake
from kvshare.vllm_connector.worker.disk_store import DiskStore
from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare.vllm_connector.worker.start import Attached, WorkerStart

_LOCK = "lock"
_LOCK_WAIT_S = 5.0  # a vLLM that is being stopped may still write
_DISK, _SHARED = "--disk", "--shared-tier"


def with_disk(
    attached: Attached, handshake: WorkerHandshake, start: WorkerStart
) -> tuple[Attached, WorkerHandshake]:
    """Return both with the disk and the shared store that are configured and usable."""
    settings = start.settings
    wanted = [_DISK] * (settings.disk_path is not None) + [_SHARED] * (settings.shared_tier is not None)
    if not wanted or handshake.unsupported:
        return attached, handshake
    problem = None
    if num_ranks() > 1:
        problem = f"it does not support tensor parallelism yet, this vLLM has {num_ranks()} ranks"
    elif len(attached.cache.parts) > 1:
        problem = "it does not support layers whose KV differs in shape yet"
    if problem is not None:
        for option in wanted:
            handshake = _warned(handshake, option, problem)
        return attached, handshake
    # A model's settings, such as its window, change KV where the weights stay the same.
    model = start.config.model_config.compute_hash()
    parts = ("heads first", handshake.weights, str(start.config.cache_config.cache_dtype), model)
    form = HeadsFirstForm.of(attached.cache.kv_layout, parts)
    disk, handshake = _disk(form, start, handshake)
    shared, handshake = _shared(form, settings.shared_tier, handshake)
    return _with(attached, handshake, settings, disk, shared)


class _OpenDisk:
    """A disk, what it had at the start, and the lock of its folder."""

    def __init__(self, tier: DiskTier, lock: int) -> None:
        self.tier, self._lock = tier, lock
        self.found: list[Segment] = tier.described()
        tier.adopt(self.found)
        tier.save_index()  # a kill may follow

    def close(self) -> None:
        self.tier.save_index()
        os.close(self._lock)


def _with(
    attached: Attached,
    handshake: WorkerHandshake,
    settings: ConnectorSettings,
    disk: _OpenDisk | None,
    shared: SharedTier | None,
) -> tuple[Attached, WorkerHandshake]:
    below: LowerTier
    if disk is not None:
        below = disk.tier if shared is None else DiskAndShared(disk.tier, shared, makes_way=True)
    elif shared is not None:
        below = shared
    else:
        return attached, handshake
    end: Callable[[], None] = disk.close if disk is not None else lambda: None
    store = DiskStore(
        attached.store.arena.buffer,
        attached.cache.kv_layout,
        below,
        write_bytes_per_s=settings.disk_write_bytes_per_s,
        on_close=end,
    )
    handshake = replace(
        handshake,
        on_disk=tuple(disk.found) if disk is not None else (),
        has_disk=True,
        has_files=disk is not None,
        shared_form=shared.form.fingerprint if shared is not None else "",
    )
    return replace(attached, store=store), handshake


def _disk(
    form: ObjectForm, start: WorkerStart, handshake: WorkerHandshake
) -> tuple[_OpenDisk | None, WorkerHandshake]:
    settings = start.settings
    if settings.disk_path is None:
        return None, handshake
    try:
        folder = folder_of(start.config, settings.disk_path)
        lock = _lock(folder)
        try:
            tier = DiskTier(
                folder / VLLM_KV_FOLDER,
                form,
                max_bytes=settings.disk_bytes,
                keep_free_bytes=settings.disk_keep_free_bytes,
            )
            tier.open()
            return _OpenDisk(tier, lock), handshake
        except OSError:
            os.close(lock)
            raise
    except OSError as exc:
        return None, _warned(handshake, _DISK, exc.strerror or type(exc).__name__)


def _shared(
    form: ObjectForm, settings: SharedTierSettings | None, handshake: WorkerHandshake
) -> tuple[SharedTier | None, WorkerHandshake]:
    """Return the shared store, which connects at its first use."""
    if settings is None:
        return None, handshake
    try:
        return open_shared_tier(settings, form, announces_segments=True), handshake
    except KVShareError as exc:
        return None, _warned(handshake, _SHARED, str(exc))


def folder_of(config: VllmConfig, path: str) -> Path:
    """Each data-parallel rank has a folder of its own."""
    rank = data_parallel_rank(config)
    return Path(path) if rank is None else Path(path) / f"rank-{rank}"


def _lock(folder: Path) -> int:
    """Lock a folder for one vLLM, until the returned descriptor is closed. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if time.monotonic() >= until:
                os.close(descriptor)
                raise OSError(
                    exc.errno, "another process uses the folder; give each vLLM one of its own"
                ) from exc
            time.sleep(0.1)
        else:
            return descriptor


def _warned(handshake: WorkerHandshake, option: str, problem: str) -> WorkerHandshake:
    return replace(handshake, warnings=(*handshake.warnings, f"{option} is not used: {problem}"))
