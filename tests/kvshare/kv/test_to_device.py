"""Small arrays go to a device together."""

from __future__ import annotations


def test_inputs_of_a_pass_are_one_copy() -> None:
    import numpy as np
    import torch

    from kvshare.kv.to_device import to_device

    arrays = (np.arange(5, dtype=np.int32), np.arange(7), np.arange(12, dtype=np.int32).reshape(3, 4))
    there = to_device(torch.device("cpu"), *arrays)
    assert [each.dtype for each in there] == [torch.int32, torch.int64, torch.int32]
    assert all(np.array_equal(each.numpy(), array) for each, array in zip(there, arrays, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in there}) == 1
    assert all(each.data_ptr() % 16 == 0 for each in there)
