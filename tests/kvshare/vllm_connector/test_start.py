"""Starts at which something is not supported: it is said, and requests are served unshared."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvshare_lab.vllm.ports import port_with_next
from tests.kvshare.vllm_connector.starts import IN_BFLOAT16, USUAL

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Start, Texts, Vllm


@pytest.mark.parametrize(
    ("name", "changes", "options", "word"),
    [
        ("mistral", {"sliding_window": 64}, {}, "SlidingWindowSpec"),
        ("olmo3", {}, {"disable_hybrid_kv_cache_manager": False}, "--disable-hybrid-kv-cache-manager"),
        (
            "llama",
            {},
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
            "layers that keep their dtype (1)",
        ),
    ],
)
def test_a_refused_model_is_served_unshared(
    start: Start,
    checkpoint: Checkpoint,
    text: Texts,
    name: str,
    changes: dict[str, object],
    options: dict[str, object],
    word: str,
) -> None:
    """The real thing starts, says why, and ignores tickets."""
    vllm = start(checkpoint(name, **changes), dtype="bfloat16", **options)
    assert any(word in refusal for refusal in vllm.side.info().refusals)
    assert_served_unshared(vllm, text(300))
    # A model without a KV cache has no group of blocks.
    connector, request = vllm.scheduler.connector, SimpleNamespace(request_id="r")
    connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=tuple), 0)
    assert connector.request_finished_all_groups(request, ()) == (False, None)


def test_more_memory_than_the_host_has_is_refused(start: Start, text: Texts) -> None:
    """It would be taken at start, and the kernel would end vLLM."""
    vllm = start("llama", max_bytes=1 << 48)
    (refusal,) = vllm.side.info().refusals
    assert "--kv-bytes takes 294912.0 GiB of host memory" in refusal
    assert_served_unshared(vllm, text(300))


def assert_served_unshared(vllm: Vllm, tokens: list[int]) -> None:
    """A ticket is ignored, and the prompt answered."""
    (answer,) = vllm.ask((tokens, vllm.ticket(tokens), "tenant"))
    assert len(answer.tokens) == 4
    assert vllm.events() == ()
    assert vllm.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 0


def test_a_taken_control_port_stops_nothing(
    start: Start, text: Texts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM serves on without sharing, and its log says in one line what to do."""
    from kvshare.vllm_connector.scheduler import lifecycle

    monkeypatch.setattr(
        lifecycle, "log", logging.getLogger("here")
    )  # vLLM takes handlers off its own loggers
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        served = start("llama", control_port=port)
        errors = (record for record in caplog.records if record.levelno == logging.ERROR)
        (line,) = [record.getMessage() for record in errors if record.name == "here"]
        assert f"127.0.0.1:{port}" in line
        assert "--control-port" in line
        assert_served_unshared(served, text(300))


def test_each_rank_has_its_own_control_port(vllm: Vllm) -> None:
    """Counted from the one of the settings; the only engine of a vLLM is no rank."""
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.scheduler.lifecycle import SchedulerSide
    from tests.kvshare.vllm_connector.test_config import config

    info = vllm.side.info()
    assert (info.data_parallel_rank, info.data_parallel_size) == (None, 1)
    base = port_with_next()
    settings = ConnectorSettings(control_port=base, data_parallel_size=3)
    sides = []
    try:
        for rank in range(2):
            of_rank = config(engine_id=f"e_dp{rank}", data_parallel_index=rank)
            sides.append(SchedulerSide(of_rank, settings, ()))
        assert [side._control.port for side in sides if side._control is not None] == [base, base + 1]
    finally:
        for side in sides:
            side.close()


def test_without_the_worker_class_nothing_is_shared(
    checkpoint: Checkpoint, start: Start, text: Texts
) -> None:
    """Plain `vllm serve` with the connector but without --worker-cls says what is missing."""
    vllm = start("llama", worker_cls="auto")
    assert any("--worker-cls" in refusal for refusal in vllm.side.info().refusals)
    tokens = text(100)
    assert len(vllm.ask((tokens, vllm.ticket(tokens), None))[0].tokens) == 4


def test_an_open_control_server_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal holds generated tokens."""
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.scheduler.lifecycle import SchedulerSide
    from kvshare.vllm_protocol.messages import TOKEN_VARIABLE

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=TOKEN_VARIABLE):
        SchedulerSide(SimpleNamespace(), ConnectorSettings(control_host="0.0.0.0"), ())


def test_other_weights_are_another_namespace(vllm: Vllm) -> None:
    """A model that is called the same but was trained on is told apart by its weights."""
    import torch

    from kvshare.vllm_connector.worker.model import weights_digest

    model = vllm.core.model_executor.driver_worker.model_runner.get_model()
    assert vllm.side.info().namespace_fields["revision"] == weights_digest(model)
    norm = model.model.layers[1].input_layernorm.weight
    before = norm.detach().clone()
    with torch.no_grad():
        norm += 0.5
    assert vllm.side.info().namespace_fields["revision"] != weights_digest(model)
    with torch.no_grad():
        norm.copy_(before)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", "float32", marks=USUAL),
        pytest.param("qwen3", "bfloat16", marks=IN_BFLOAT16),
    ],
)
def test_both_engines_know_a_model_by_the_same_fingerprint(
    vllm: Vllm, checkpoint: Checkpoint, name: str, dtype: str
) -> None:
    """A calibration is found by it, whoever measured and whoever serves, in whatever dtype."""
    from kvshare.embedded.stored_model import stored_fingerprint

    assert str(vllm.core.vllm_config.model_config.dtype) == f"torch.{dtype}"
    assert vllm.side.info().fingerprint == stored_fingerprint(str(checkpoint(name)))
