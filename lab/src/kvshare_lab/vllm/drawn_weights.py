"""
Tiny models whose random weights vLLM draws itself, so that a configuration is all that their folder has.

For kinds whose weights transformers writes under other names or in other shapes than vLLM reads, or does not
know. A vLLM with `load_format` "dummy" reads no weights; its own ones are so small that no text matters.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_STD = 0.12  # as that of the other tiny models
_MODULE = "configuration_tiny"
# Of a model that neither transformers nor vLLM has a configuration for: it takes every field.
_OWN_CLASS = '''"""The configuration of a tiny model with random weights."""

from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "{model_type}"

    def __init__(self, **fields):
        super().__init__(**fields)
'''


def write_configuration(folder: Path, fields: Mapping[str, Any], *, is_known: bool) -> None:
    """Write config.json; unless it `is_known` to transformers or vLLM, with a class of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {**fields, "dtype": "float32"}
    if not is_known:
        own["auto_map"] = {"AutoConfig": f"{_MODULE}.TinyConfig"}
        code = _OWN_CLASS.format(model_type=fields["model_type"])
        (folder / f"{_MODULE}.py").write_text(code, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(own, indent=1), encoding="utf-8")


def _draw(_: Any, model: Any, __: Any, *, seed: int = 0) -> None:
    """All parameters but those of norms, which are ones."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name and parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _STD)


@contextmanager
def drawn_weights() -> Iterator[None]:
    """
    Inside, a vLLM of this process with `load_format` "dummy" gets weights by which text matters.

    vLLM 0.32 on a CPU chooses experts by sigmoids only if they are in groups; here all may be one group.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    own = CPURouter.__init__

    def init(router: Any, *args: Any, **named: Any) -> None:
        own(router, *args, **named)
        if router.scoring_func == "sigmoid" and router.custom_routing_function is None:
            router.use_grouped_topk = True
            router.num_expert_group, router.topk_group = router.num_expert_group or 1, router.topk_group or 1

    with (
        patch.object(DummyModelLoader, "load_weights", _draw),
        patch.object(CPURouter, "__init__", init),
    ):
        yield
