"""Our listening kernels, run by Triton's interpreter, against the operations of torch that they replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.without_gpu.conftest import Ask

CASES: list[dict[str, Any]] = [
    *({"dtype": dtype, "memory": memory} for dtype in ("bfloat16", "float32") for memory in ("BNHC", "BHNC")),
    *({"num_rows": count, "dim": 128} for count in (1, 2, 31, 32)),
    *({"group": group, "num_rows": 32} for group in (1, 4, 7)),
    *({"num_slots": count, "num_rows": 3} for count in (17, 64, 65, 1000)),
    *({"num_heads": count, "programs": 1, "dtype": "float32"} for count in (1, 3)),
    {"programs": 12, "num_slots": 1000, "num_rows": 32},
    {"num_slots": 3000, "num_heads": 1, "block_size": 32, "dtype": "float16"},
    {"num_passes": 3},
    {"num_passes": 2, "num_heads": 1, "group": 2},
    {"dim": 80, "dtype": "float16"},
    {"hooked": True, "num_passes": 2},
]
FAULTS = ["a slot further", "a slot less", "heads exchanged", "blocks exchanged", "another row"]


def name_of(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernels_hear_what_torch_hears(own_listening: Ask, case: dict[str, Any]) -> None:
    """Rows at the first, the last and other slots; paged keys among what is no number; one chunk or many."""
    assert own_listening(case)["error_share"] < 1e-5


def test_what_all_keys_have_in_common_is_not_rounded(own_listening: Ask) -> None:
    """No mean is subtracted first: products have 32 bits here."""
    assert own_listening({"common": 256.0})["error_share"] < 1e-3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_wrong_is_heard(own_listening: Ask, fault: str, dtype: str) -> None:
    """The comparison above fails with a mask that is off by one, other heads, blocks or rows."""
    assert own_listening({"fault": fault, "dtype": dtype})["error_share"] > 0.1


@pytest.mark.parametrize(
    ("device", "layout", "dtypes", "room", "is_used"),
    [
        ("cuda", "content", "bfloat16 bfloat16", 232448, True),
        ("cuda", "content", "float32 float32", 101376, True),
        ("cpu", "content", "bfloat16 bfloat16", 232448, False),
        ("cuda", "transposed", "bfloat16 bfloat16", 232448, False),
        ("cuda", "content", "bfloat16 float8_e4m3fn", 232448, False),
        ("cuda", "content", "bfloat16 uint8", 232448, False),
        ("cuda", "content", "bfloat16 bfloat16", 65536, False),
    ],
)
def test_kernels_are_used_where_they_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str, dtypes: str, room: int, is_used: bool
) -> None:
    """On a GPU with room for them, with keys that they can read; torch does the same elsewhere."""
    pytest.importorskip("triton", reason="it is installed with vLLM on x86_64 only")
    from kvshare.vllm_connector.worker import listening_kernels, partial_forward

    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    properties = SimpleNamespace(shared_memory_per_block=49152, shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    listening_kernels.has_room.cache_clear()
    of_query, of_keys = (getattr(torch, name) for name in dtypes.split())
    cache: Any = SimpleNamespace(layout=layout, kv_layout=SimpleNamespace(dtype=of_keys))
    query: Any = SimpleNamespace(device=torch.device(device, 0), dtype=of_query)
    found = partial_forward.listening_kernels(cache, query)
    listening_kernels.has_room.cache_clear()
    assert found is (listening_kernels if is_used else None)
