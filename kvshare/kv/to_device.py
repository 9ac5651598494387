"""Copies small arrays to a device in one copy, as the number of copies costs time there, not the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Return the arrays as tensors on a device, by one copy. The host does not wait for a GPU to make it."""
    is_cuda = device.type == "cuda"
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_cuda)
    for array, room in zip(arrays, torch.split(host, sizes), strict=True):
        room.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.split(host.to(device, non_blocking=is_cuda), sizes)
    return [
        room[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, room in zip(arrays, there, strict=True)
    ]
