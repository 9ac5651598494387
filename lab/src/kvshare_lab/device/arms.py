"""The two servers of a simulated benchmark: stock vLLM, and vLLM with the connector behind the proxy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvshare.settings import Settings
from kvshare_lab.device.clock import Clock
from kvshare_lab.device.disk import SimulatedDisk
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.ranks import alike_ranks
from kvshare_lab.device.servers import Server
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.device.vllm_config import vllm_config
from kvshare_lab.device.worker import virtual_threads


@contextmanager
def servers(
    profile: Profile,
    settings: Settings,
    *,
    chooses: bool = True,
    ranks: int = 1,
    copies_blocks: bool = True,
    disk_bytes_per_s: float | None = None,
) -> Iterator[tuple[Server, SharingServer]]:
    """Both, each with a clock of its own. `disk_bytes_per_s`: of a disk below the memory of ours."""
    init_none_hash(get_hash_fn_by_name("sha256"))
    with ExitStack() as opened:
        opened.enter_context(torch.inference_mode())
        opened.enter_context(alike_ranks(ranks))
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvshare-device-")))
        config = vllm_config(profile.model, folder)
        plain = Server(profile, config, SimulatedGpu(profile.costs, Clock()))
        opened.callback(plain.close)
        gpu, config = SimulatedGpu(profile.costs, Clock()), vllm_config(profile.model, folder, shares=True)
        opened.enter_context(virtual_threads(gpu))
        disk = None if disk_bytes_per_s is None else SimulatedDisk(gpu.clock, disk_bytes_per_s)
        shared = SharingServer(
            profile, config, gpu, settings, chooses=chooses, copies_blocks=copies_blocks, disk=disk
        )
        opened.callback(shared.close)
        yield plain, shared
