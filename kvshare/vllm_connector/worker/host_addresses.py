"""Whether kernels of a device may use the addresses of registered host memory as the host does."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SAME_ADDRESSES = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def has_host_addresses(number: int, buffer: torch.Tensor, driver: Any = None) -> bool:
    """
    Return whether device `number`, the current one, has the addresses of this registered memory.

    A kernel that used a wrong one would end the process's work on the device. Without libcuda, as with ROCm,
    the answer is no. `driver`: libcuda, loaded by default.
    """
    answer = ctypes.c_int(0)
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGetAttribute(ctypes.byref(answer), _SAME_ADDRESSES, number)
        ends = (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes - 1)
        return error == 0 and bool(answer.value) and all(_of_device(driver, end) == end for end in ends)
    except (OSError, AttributeError):
        return False


def _of_device(driver: Any, address: int) -> int | None:
    found = ctypes.c_void_p()
    error = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    return found.value if error == 0 else None
