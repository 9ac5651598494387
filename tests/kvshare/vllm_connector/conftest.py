"""
Fixtures of the tests that run vLLM in this process.

These tests run in a pytest of their own (`make test` starts two): vLLM binds threads and keeps global state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare_lab.vllm.absent_torchvision import name_torchvision
from kvshare_lab.vllm.drawn_weights import drawn_weights
from kvshare_lab.vllm.kinds import DRAWN
from tests.kvshare.vllm_connector.frozen_objects import frozen
from tests.kvshare.vllm_connector.in_process_vllm import (
    Checkpoint,
    Copies,
    Start,
    Texts,
    Vllm,
    copies_of,
    random_text,
)
from tests.kvshare.vllm_connector.inspected_models import inspected_here
from tests.kvshare.vllm_connector.registered_kernels import registered_once
from tests.kvshare.vllm_connector.starts import USUAL, beside_their_likes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Every test here is vLLM's process's; warnings of vLLM's own code are none of ours. Tests of the same vLLM
    follow each other, whatever files they are in.
    """
    items[:] = beside_their_likes(items)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if item.get_closest_marker("long") is None:
                item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("llama")` is a folder with a random model; heads are 32 wide, as vLLM's CPU kernels ask."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str, **changes: Any) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        from kvshare_lab.bench.random_models import ARCHITECTURES
        from kvshare_lab.vllm import kinds

        path = folder / "-".join([name, *(f"{key}={value}" for key, value in changes.items())])
        if path.exists():
            return path
        if name in kinds.TEXT or name in kinds.MULTIMODAL:
            assert not changes
            return kinds.write_kind(name, path)
        config = ARCHITECTURES[name]()
        for key, value in {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, **changes}.items():
            setattr(config, key, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" not in parameter_name:
                    parameter.normal_(0.0, 0.12)
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session", params=["eager", pytest.param("compiled", marks=pytest.mark.long)])
def mode(request: pytest.FixtureRequest) -> str:
    """How vLLM runs the model: everything is tested eager, and again compiled, as vLLM does by default."""
    return str(request.param)


@pytest.fixture(scope="session")
def start(checkpoint: Checkpoint, mode: str) -> Iterator[Start]:
    """`start("llama", **options)`: a vLLM; the one before it is closed unless it is the very same."""
    current: list[tuple[object, Vllm]] = []

    def close() -> None:
        while current:
            with frozen():
                current.pop()[1].close()

    def begin(name: str | Path = "llama", **options: Any) -> Vllm:
        # As many blocks as tests need: vLLM fills all of a gibibyte with zeros.
        options = {"enforce_eager": mode == "eager", "num_gpu_blocks_override": 512, **options}
        if name in DRAWN:
            options |= {"load_format": "dummy", "trust_remote_code": True}
        wanted = (str(name), sorted(options.items()))
        if current and current[0][0] == wanted:
            return current[0][1]
        close()
        path = name if isinstance(name, Path) else checkpoint(name)
        name_torchvision()  # before a model is loaded, and after transformers has looked for it
        import torch._dynamo
        import vllm.entrypoints.llm  # noqa: F401

        # Else vLLM compiles what it does with log-probabilities, for some seconds at each new shape.
        torch._dynamo.config.disable = options["enforce_eager"]

        gc.freeze()  # what is there now stays, those modules too
        with registered_once(), inspected_here(), drawn_weights(), frozen():
            current.append((wanted, Vllm(path, **options)))
        return current[0][1]

    yield begin
    close()


@pytest.fixture
def vllm(start: Start, request: pytest.FixtureRequest) -> Iterator[Vllm]:
    """The one of the mark `starts`, else the usual one: Llama in float32. Nothing may be left over."""
    mark = request.node.get_closest_marker("starts") or USUAL.mark
    machine = start(*mark.args, **mark.kwargs)
    yield machine
    machine.check_idle()


@pytest.fixture
def text() -> Texts:
    """`text(600, seed=1)`: random token ids."""
    return random_text


@pytest.fixture
def copies() -> Copies:
    """`copies(event, (0, 100), (130, 300), shift=0)`: spans of a donor, moved; a copy a segment."""
    return copies_of


@pytest.fixture
def num_brief(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes were to end before the last layer so far."""
    from kvshare.vllm_connector.worker.attention_hooks import ending

    calls = list[int]()

    def noted(watch: Any, num_layers: int) -> Any:
        calls.append(num_layers)
        return ending(watch, num_layers)

    monkeypatch.setattr("kvshare.vllm_connector.worker.partial_forward.ending", noted)
    return lambda: len(calls)
