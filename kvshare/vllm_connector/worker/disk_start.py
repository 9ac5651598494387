"""
Opens the disk below a worker's memory, with what an earlier process has left there.

It needs the model: files of other weights, or of another form, are never read. Where the disk cannot be used,
KV is in memory only, and a warning says why.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm.config import VllmConfig

from kvshare.kv.layout import KVLayout
from kvshare.tiers import VLLM_KV_FOLDER
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import HeadsFirstForm
from kvshare.vllm_connector.config import ConnectorSettings, data_parallel_rank
from kvshare.vllm_connector.metadata import WorkerHandshake
from kvshare.vllm_connector.worker.disk_store import DiskStore
from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare.vllm_connector.worker.start import Attached, WorkerStart

_LOCK = "lock"
_LOCK_WAIT_S = 5.0  # a vLLM that is being stopped may still write


def with_disk(
    attached: Attached, handshake: WorkerHandshake, start: WorkerStart
) -> tuple[Attached, WorkerHandshake]:
    """The same with a disk below the memory, if one is set up and can be used."""
    settings = start.settings
    if settings.disk_path is None or handshake.unsupported:
        return attached, handshake
    if num_ranks() > 1:
        problem = f"it does not support tensor parallelism yet, this vLLM has {num_ranks()} ranks"
        return attached, _warned(handshake, problem)
    if len(attached.cache.parts) > 1:
        return attached, _warned(handshake, "it does not support layers whose KV differs in shape yet")
    layout = attached.cache.kv_layout
    try:
        folder = folder_of(start.config, settings.disk_path)
        lock = _lock(folder)
        try:
            disk = _opened(folder, layout, settings, start.config, handshake)
        except OSError:
            os.close(lock)
            raise
    except OSError as exc:
        return attached, _warned(handshake, exc.strerror or type(exc).__name__)
    found = disk.described()
    disk.adopt(found)
    disk.save_index()  # a kill may follow
    rate = settings.disk_write_bytes_per_s
    store = DiskStore(
        attached.store.arena.buffer, layout, disk, write_bytes_per_s=rate, unlock=partial(os.close, lock)
    )
    return replace(attached, store=store), replace(handshake, on_disk=tuple(found), has_disk=True)


def folder_of(config: VllmConfig, path: str) -> Path:
    """Each data-parallel rank has a folder of its own."""
    rank = data_parallel_rank(config)
    return Path(path) if rank is None else Path(path) / f"rank-{rank}"


def _opened(
    folder: Path,
    layout: KVLayout,
    settings: ConnectorSettings,
    config: VllmConfig,
    handshake: WorkerHandshake,
) -> DiskTier:
    # A model's settings, such as its window, change KV where the weights stay the same.
    model = config.model_config.compute_hash()
    parts = ("heads first", handshake.weights, str(config.cache_config.cache_dtype), model)
    disk = DiskTier(
        folder / VLLM_KV_FOLDER,
        HeadsFirstForm.of(layout, parts),
        max_bytes=settings.disk_bytes,
        keep_free_bytes=settings.disk_keep_free_bytes,
    )
    disk.open()
    return disk


def _lock(folder: Path) -> int:
    """One vLLM at a time; the folder is free when the descriptor is closed. Raises OSError."""
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


def _warned(handshake: WorkerHandshake, problem: str) -> WorkerHandshake:
    return replace(handshake, warnings=(*handshake.warnings, f"--disk is not used: {problem}"))
