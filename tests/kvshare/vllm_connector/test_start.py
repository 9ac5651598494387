"""What is found at start: layouts, self-test, what is not supported. That is served unshared."""

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest


class TestLayouts:
    """A layout is found by writing through the backend; here the backend is a permutation of our own."""

    N, H, D = 32, 2, 32

    def block(self, permutation: Any = None) -> tuple[Any, Any]:
        import torch

        block = torch.zeros(self.H, self.N, 2 * self.D)

        def write(k: Any, v: Any) -> None:
            rows = torch.cat([k, v], dim=-1).permute(1, 0, 2)  # (H, N, 2 D): the content layout
            flat = rows.flatten()
            block.copy_((flat if permutation is None else flat[permutation]).view_as(block))

        return block, write

    def test_content(self) -> None:
        from kvshare.vllm_connector.worker.paged_cache import find_layout

        layout = find_layout(*self.block())
        assert layout is not None
        assert layout.name == "content"

    def test_any_permutation_is_learned(self) -> None:
        import torch

        from kvshare.vllm_connector.worker.paged_cache import find_layout

        permutation = torch.randperm(self.H * self.N * 2 * self.D)
        layout = find_layout(*self.block(permutation))
        assert layout is not None
        assert layout.name == "learned"

    def test_a_cache_that_rounds_is_not_understood(self) -> None:
        """As a quantised one does."""
        from kvshare.vllm_connector.worker.paged_cache import find_layout

        block, write = self.block()

        def write_rounded(k: Any, v: Any) -> None:
            write(k, v)
            block.round_()

        assert find_layout(block, write_rounded) is None

    def test_vllms_own(self, start: Any) -> None:
        assert start("llama").side.info().settings["attention_backend"] == "CPU_ATTN/transposed"


class TestSelfTest:
    """A check that cannot fail tests nothing: each is made to."""

    def self_test(self, vllm: Any) -> Any:
        from kvshare.vllm_connector.worker.self_test import SelfTest

        return SelfTest(vllm.worker._cache, vllm.worker._forward, vocab_size=300)

    def test_they_hold(self, start: Any) -> None:
        self_test = self.self_test(vllm := start("llama"))
        assert self_test.check_layout() is None
        assert self_test.check_partial_attention() is None
        assert self_test.check_rotation(vllm.worker._rotation) is None

    def test_wrong_frequencies_are_found(self, start: Any) -> None:
        from kvshare.kv.rotation import Rotation

        vllm = start("llama")
        wrong = Rotation(vllm.worker._rotation.inverse_frequencies * 1.01)
        assert "moved keys" in self.self_test(vllm).check_rotation(wrong)

    def test_a_layer_without_positions_is_found(self, start: Any, monkeypatch: Any) -> None:
        import torch

        vllm = start("llama", enforce_eager=True)  # a compiled model does not ask its modules
        model = vllm.core.model_executor.driver_worker.model_runner.get_model()
        attention = model.model.layers[1].self_attn
        self_test = self.self_test(vllm)

        class NoPositions(torch.nn.Module):
            def forward(self, positions: Any, q: Any, k: Any) -> Any:
                return q, k

        with monkeypatch.context() as patch:
            patch.setitem(attention._modules, "rotary_emb", NoPositions())
            assert "moved keys" in self_test.check_rotation(vllm.worker._rotation)
        assert self_test.check_rotation(vllm.worker._rotation) is None

    def test_a_mask_that_sees_later_keys_is_found(self, start: Any, monkeypatch: Any) -> None:
        """The shortcut of the published CacheBlend code: recomputed tokens see what comes after them."""
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        vllm = start("llama")
        self_test = self.self_test(vllm)
        common = PartialForward._common

        def shortcut(forward: Any, runs: Any, slots: Any, positions: Any) -> Any:
            metadata = common(forward, runs, slots, positions)
            metadata.causal = False
            return metadata

        with monkeypatch.context() as patch:
            patch.setattr(PartialForward, "_common", shortcut)
            assert "partial attention" in self_test.check_partial_attention()


def test_passes_are_bounded() -> None:
    """By tokens, and by runs: backends keep buffers for as many sequences as vLLM runs at most."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.partial_forward import Run, split

    spans = [Span(0, 1), Span(2, 3), Span(4, 5), Span(6, 30), Span(31, 32)]
    runs = [Run((1,), span, tuple(range(span.start, span.end)), span.start) for span in spans]
    batches = list(split(runs, 10, 2))
    assert all(len(batch) <= 2 and sum(len(run.span) for run in batch) <= 10 for batch in batches)
    computed = [token for batch in batches for run in batch for token in run.token_ids]
    assert computed == [token for run in runs for token in run.token_ids]


def test_a_worker_that_cannot_even_look_refuses(start: Any, monkeypatch: Any) -> None:
    """A backend whose metadata cannot be built does not keep vLLM from starting."""
    from kvshare.vllm_connector.worker import worker

    def fail(*_: Any) -> None:
        raise RuntimeError("no such backend")

    given = start("llama").worker
    monkeypatch.setattr(worker, "PartialForward", fail)
    fresh = worker.ConnectorWorker(given._config, given._spec, given._layer_names)
    fresh.attach_model(None)  # type: ignore[arg-type]  # it does not come to that
    assert fresh.handshake is not None
    assert "no such backend" in fresh.handshake.unsupported[0]


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as `unsupported_reasons` reads; everything supported but for the changes."""
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(
        runner_type="generate",
        is_encoder_decoder=False,
        is_attention_free=False,
        is_hybrid=False,
        use_mla=False,
        is_multimodal_model=False,
        enable_prompt_embeds=False,
        get_sliding_window=lambda: changes.get("window"),
    )
    for part in (parallel, model):
        for key in vars(part).keys() & changes.keys():
            setattr(part, key, changes[key])
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        speculative_config=changes.get("speculative"),
        lora_config=changes.get("lora"),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=changes.get("policy", "recompute"),
            engine_id=changes.get("engine_id", "0b7c"),
        ),
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2}, "data parallel"),
        ({"decode_context_parallel_size": 2}, "context parallel"),
        ({"use_mla": True}, "MLA"),
        ({"window": 4096}, "4096"),
        ({"is_hybrid": True}, "hybrid"),
        ({"is_attention_free": True}, "recurrent"),
        ({"speculative": object()}, "speculative"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"policy": "fail"}, "recompute"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"engine_id": "0b7c_dp0"}, "data parallel"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"lora": object()}, "LoRA"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], word: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvshare.vllm_connector.config import unsupported_reasons

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert unsupported_reasons(config(), cache) == []
    (message,) = unsupported_reasons(config(**changes), cache)
    assert word in message


def test_vllms_own_settings_are_read_right(start: Any, monkeypatch: Any) -> None:
    """On the configuration that vLLM made itself, set as it sets it for a model with images, or for XPU."""
    from vllm.config import MultiModalConfig
    from vllm.platforms import current_platform

    from kvshare.vllm_connector.config import unsupported_reasons

    vllm = start("llama")
    config, cache = vllm.core.vllm_config, vllm.scheduler.kv_cache_config
    assert unsupported_reasons(config, cache) == []
    with monkeypatch.context() as patch:
        patch.setattr(config.model_config, "multimodal_config", MultiModalConfig())
        (reason,) = unsupported_reasons(config, cache)
        assert "multimodal" in reason
    with monkeypatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda _: False)
        patch.setattr(type(current_platform), "device_name", "xpu")
        (reason,) = unsupported_reasons(config, cache)
        assert "xpu" in reason


@pytest.mark.parametrize(
    ("name", "changes", "options", "word"),
    [
        ("mistral", {"sliding_window": 64}, {}, "sliding window"),
        ("llama", {}, {"kv_cache_dtype": "fp8"}, "quantised"),
        ("llama", {}, {"enable_lora": True, "max_lora_rank": 8}, "LoRA"),
        ("llama", {}, {"enable_prompt_embeds": True}, "prompt embeddings"),
    ],
)
def test_a_refused_model_is_served_unshared(
    start: Any, checkpoint: Any, text: Any, name: str, changes: Any, options: Any, word: str
) -> None:
    """The real thing starts, says why, and ignores tickets."""
    vllm = start(checkpoint(name, **changes), dtype="bfloat16", **options)
    assert any(word in refusal for refusal in vllm.side.info().refusals)
    assert_served_unshared(vllm, text(300))


def assert_served_unshared(vllm: Any, tokens: list[int]) -> None:
    """A ticket is ignored, and the prompt answered."""
    (answer,) = vllm.ask((tokens, vllm.ticket(tokens), "tenant"))
    assert len(answer.tokens) == 4
    assert vllm.events() == ()
    assert vllm.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 0


def test_inside_another_connector_nothing_is_shared(start: Any, text: Any) -> None:
    """vLLM's MultiConnector hands neither the model nor our metadata on as we need them; we say so."""
    ours = {
        "kv_connector": "KVShareConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvshare": {"control_port": 0}},
    }
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours]}}
    vllm = start("llama", kv_transfer_config=outer)
    (child,) = vllm.scheduler.connector.sub_connectors
    (refusal,) = child._scheduler_side.info().refusals
    assert "MultiConnector" in refusal
    tokens = text(300)
    assert len(vllm.ask((tokens, vllm.ticket(tokens), None))[0].tokens) == 4


def test_a_taken_control_port_stops_nothing(start: Any, text: Any, caplog: Any, monkeypatch: Any) -> None:
    """vLLM serves on without sharing, and its log says in one line what to do."""
    from kvshare.vllm_connector.scheduler import lifecycle

    monkeypatch.setattr(
        lifecycle, "log", logging.getLogger("here")
    )  # vLLM takes handlers off its own loggers
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        served = start("llama", control_port=port)
        (line,) = [record.getMessage() for record in caplog.records if record.name == "here"]
        assert f"127.0.0.1:{port}" in line
        assert "--control-port" in line
        assert_served_unshared(served, text(300))


@pytest.mark.parametrize("attribute", ["lora_request", "mm_features", "prompt_embeds", "resumable"])
def test_requests_of_other_kinds_are_refused(attribute: str) -> None:
    """One by one, on vLLM's own request object."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvshare.engines.vllm.wire import Ticket, digest_of
    from kvshare.vllm_connector.scheduler.request_state import why_unshared

    tokens = list(range(40))
    request = Request("r", tokens, SamplingParams(max_tokens=1), None)
    ticket = Ticket("t", "ns", digest_of(tokens), len(tokens))
    assert why_unshared(request, ticket, may_move_keys=True) is None
    setattr(request, attribute, ["something"])
    assert why_unshared(request, ticket, may_move_keys=True) is not None


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"max_byte": 1}, "max_byte"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": "1"}, "max_bytes"),
        ({"control_host": 1}, "control_host"),
        ([], "object"),
    ],
)
def test_settings_name_what_is_wrong(given: Any, word: str) -> None:
    from kvshare.vllm_connector.config import ConnectorSettings

    with pytest.raises(ValueError, match=word):
        ConnectorSettings.from_extra_config({"kvshare": given})


def test_without_the_worker_class_nothing_is_shared(checkpoint: Any, start: Any, text: Any) -> None:
    """Plain `vllm serve` with the connector but without --worker-cls says what is missing."""
    vllm = start("llama", worker_cls="auto")
    assert any("--worker-cls" in refusal for refusal in vllm.side.info().refusals)
    tokens = text(100)
    assert len(vllm.ask((tokens, vllm.ticket(tokens), None))[0].tokens) == 4


def test_an_open_control_server_needs_a_token(monkeypatch: Any) -> None:
    """The journal holds generated tokens."""
    from kvshare.engines.vllm.wire import TOKEN_VARIABLE
    from kvshare.vllm_connector.config import ConnectorSettings
    from kvshare.vllm_connector.scheduler.lifecycle import SchedulerSide

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=TOKEN_VARIABLE):
        SchedulerSide(SimpleNamespace(), ConnectorSettings(control_host="0.0.0.0"), ())


def test_other_weights_are_another_namespace(start: Any) -> None:
    """A model that is called the same but was trained on is told apart by its weights."""
    import torch

    from kvshare.vllm_connector.worker.model import weights_digest

    vllm = start("llama")
    model = vllm.core.model_executor.driver_worker.model_runner.get_model()
    assert vllm.side.info().namespace_fields["revision"] == weights_digest(model)
    norm = model.model.layers[1].input_layernorm.weight
    before = norm.detach().clone()
    with torch.no_grad():
        norm += 0.5
    assert vllm.side.info().namespace_fields["revision"] != weights_digest(model)
    with torch.no_grad():
        norm.copy_(before)
