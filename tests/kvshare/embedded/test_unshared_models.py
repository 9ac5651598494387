"""Models of which nothing can be shared answer as they do by themselves, and say why nothing is shared."""

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from delta_tree import TokenIds, token_ids
from kvshare.demo import MODEL_PATH
from kvshare.embedded.decoder import DecoderModel, load_network
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.loading import served, verification_document
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.embedded.unshared import UnsharedModel
from kvshare.engine import (
    Delta,
    Event,
    GenerationRequest,
    SamplingParams,
    Started,
)
from kvshare.errors import ModelError
from kvshare.requests import SharingReport
from kvshare.settings import Settings, load_settings
from kvshare_lab.bench.random_configurations import TINY

SIZES: dict[str, Any] = {**TINY, "num_hidden_layers": 4}
PLAIN = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
STATE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **SIZES,
        attn_layer_period=4,
        attn_layer_offset=3,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
    ),
    "bamba": lambda: transformers.BambaConfig(**SIZES, **STATE, attn_layer_indices=[1]),
    "granite-hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SIZES,
        **STATE,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=64,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "minimax": lambda: transformers.MiniMaxConfig(**SIZES, head_dim=16, num_local_experts=2),
    "mamba": lambda: transformers.MambaConfig(**PLAIN, state_size=8),
    "mamba2": lambda: transformers.Mamba2Config(
        **PLAIN, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=300, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=512
    ),
}


def network(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = None
    return model


def engine_of(path: Path, model: DecoderModel[Any]) -> EmbeddedEngine:
    def load(_: Settings, stopping: threading.Event) -> tuple[DecoderModel[Any], PromptEncoder]:
        return model, PromptEncoder.load(MODEL_PATH)

    settings = load_settings(
        overrides={"store.path": str(path), "index.dense": False, "engine.prefill_chunk_tokens": 16}
    )
    return EmbeddedEngine(settings, load=load)


async def answered(
    engine: EmbeddedEngine, prompt: TokenIds, *, num_tokens: int, choices: int = 1
) -> tuple[SharingReport, list[list[int]]]:
    """What was shared, and the greedy tokens of each choice."""
    request = GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant="t", scope="tenant"),
        prompt=await engine.encode_tokens(prompt.tolist()),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, n=choices, logprobs=0),
    )
    events: list[Event] = []
    await engine.generate(request, events.append)
    await engine.settle()
    tokens: list[list[int]] = [[] for _ in range(choices)]
    for event in events:
        if isinstance(event, Delta):
            tokens[event.choice] += [each.token_id for each in event.logprobs]
    return next(event.report for event in events if isinstance(event, Started)), tokens


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Twice the same prompt: nothing is stored, nothing shared, the reason is said."""
    model = served(network(family), name=family)
    assert isinstance(model, UnsharedModel)
    prompt = token_ids(np.random.default_rng(0).integers(16, 290, 100))
    own: torch.Tensor = network(family).generate(  # type: ignore[operator]  # mypy takes it for a submodule
        torch.tensor([prompt.tolist()]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    engine = engine_of(tmp_path, model)
    await engine.start()
    try:
        for _ in range(2):
            report, tokens = await answered(engine, prompt, num_tokens=12)
            assert tokens == [own[0, len(prompt) :].tolist()]
            assert (report.decision, report.reason) == ("full", "model_unshared")
        assert engine.status().num_nodes == 0
    finally:
        await engine.stop()


async def test_choices_go_on_from_the_same_prompt_apart(tmp_path: Path) -> None:
    """A state is changed by every token: each choice has its own."""
    engine = engine_of(tmp_path, served(network("qwen3-next"), name="hybrid"))
    await engine.start()
    try:
        prompt = token_ids(np.random.default_rng(1).integers(16, 290, 60))
        _, alone = await answered(engine, prompt, num_tokens=8)
        _, together = await answered(engine, prompt, num_tokens=8, choices=3)
        assert together == alone * 3
    finally:
        await engine.stop()


def test_verify_says_why_nothing_is_shared() -> None:
    found = verification_document(served(network("qwen3-next"), name="hybrid"))
    assert (found["shares"], found["layers"]) == ("nothing", [])
    assert "linear_attention" in found["why"]


def test_a_cache_that_does_not_continue_a_prompt_is_refused() -> None:
    """Else answers would be wrong, and nobody would know."""
    model = network("qwen3-next")
    forward = model.forward

    def forgetting(*given: Any, **named: Any) -> Any:
        cache = named.get("past_key_values")
        if cache is not None:
            for layer in cache.layers:
                if hasattr(layer, "recurrent_states"):
                    cache.reset()
                    break
        return forward(*given, **named)

    forgetting.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # of functions
    model.forward = forgetting
    with pytest.raises(ModelError, match="logits with and without its own cache differ"):
        served(model, name="forgetful")


def test_a_folder_is_loaded_either_way(tmp_path: Path) -> None:
    network("bloom").save_pretrained(tmp_path)
    assert not served(load_network(tmp_path, device="cpu"), name="bloom").can_share
    assert served(load_network(MODEL_PATH, device="cpu"), name="demo").can_share
