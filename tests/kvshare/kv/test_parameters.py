"""What is read from a model's own parameters: its rotary frequencies, and a fingerprint of its weights."""

from __future__ import annotations

import pytest
import torch

from kvshare.kv.parameters import frequency_tables, is_norm, model_fingerprint, rope_digest

FAST, SLOW = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.25])


def rotary(*, scaling: object = None, kind: object = None, **tables: torch.Tensor) -> torch.nn.Module:
    """A module with these buffers."""
    module = torch.nn.Module()
    for name, table in tables.items():
        module.register_buffer(name, table.clone())
    if scaling is not None:
        module.attention_scaling = scaling  # type: ignore[assignment]
    if kind is not None:
        module.rope_type = kind  # type: ignore[assignment]
    return module


def model_of(*modules: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(*modules))


def test_tables_are_found_wherever_they_are() -> None:
    """Not those that a module keeps to reset itself, nor other buffers."""
    model = model_of(
        rotary(inv_freq=FAST, original_inv_freq=SLOW),
        rotary(inv_freq=SLOW, other=FAST),
        torch.nn.LayerNorm(2),
    )
    tables, unsupported = frequency_tables(model)
    assert [table.tolist() for table in tables] == [FAST.tolist(), SLOW.tolist()]
    assert unsupported == ""
    assert frequency_tables(torch.nn.Linear(2, 2)) == ([], "")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_no_table(kind: str) -> None:
    """No stored row could be moved by them; the reason names the type. Others stay as they are."""
    tables, unsupported = frequency_tables(model_of(rotary(inv_freq=FAST, kind=kind), rotary(inv_freq=SLOW)))
    assert [table.tolist() for table in tables] == [SLOW.tolist()]
    assert f"rope type '{kind}' changes its frequencies" in unsupported


@pytest.mark.parametrize("kind", [None, "default", "linear", "llama3", "yarn"])
def test_fixed_frequencies_are_a_table(kind: str | None) -> None:
    assert len(frequency_tables(model_of(rotary(inv_freq=FAST, kind=kind)))[0]) == 1


def test_a_module_may_have_a_table_for_each_type_of_layer() -> None:
    """As Gemma 3's: one of them may change, and what is not named is fixed."""
    tables = {"full_attention_inv_freq": FAST, "sliding_attention_inv_freq": SLOW}
    kinds = {"full_attention": "dynamic"}
    found, unsupported = frequency_tables(model_of(rotary(kind=kinds, **tables)))
    assert [table.tolist() for table in found] == [SLOW.tolist()]
    assert "dynamic" in unsupported


def test_a_digest_is_that_of_all_frequencies_and_their_scaling() -> None:
    """In their order; of which dtype the model is does not matter where values are equal."""
    models = [
        model_of(rotary(inv_freq=FAST)),
        model_of(rotary(inv_freq=SLOW)),
        model_of(rotary(inv_freq=FAST, scaling=1.2)),
        model_of(rotary(inv_freq=FAST), rotary(inv_freq=SLOW)),
        model_of(rotary(inv_freq=SLOW), rotary(inv_freq=FAST)),
        model_of(),
    ]
    assert len({rope_digest(model) for model in models}) == len(models)
    assert rope_digest(models[0]) == rope_digest(model_of(rotary(inv_freq=FAST.double())))
    assert rope_digest(models[0]) == rope_digest(model_of(rotary(inv_freq=FAST, scaling=1.0)))


def test_the_scaling_of_a_type_of_layers_counts_for_it() -> None:
    def module(**scaling: float) -> torch.nn.Module:
        both = rotary(full_inv_freq=FAST, sliding_inv_freq=SLOW)
        for name, value in scaling.items():
            setattr(both, name, value)
        return both

    scalings: list[dict[str, float]] = [
        {},
        {"full_attention_scaling": 1.2},
        {"sliding_attention_scaling": 1.2},
    ]
    assert len({rope_digest(module(**scaling)) for scaling in scalings}) == 3


NAMED = [("model.norm.weight", torch.tensor([1.0, 2.0])), ("model.layers.0.input_norm.weight", torch.ones(2))]


def fingerprint(*named: tuple[str, torch.Tensor], num_layers: int = 2, head_dim: int = 4) -> str:
    return model_fingerprint(named or NAMED, num_layers=num_layers, head_dim=head_dim)


def test_a_fingerprint_is_the_same_however_a_model_is_loaded() -> None:
    """In another order, dtype, with another prefix, and with weights that are quantised or divided."""
    found = fingerprint()
    assert len(found) == 32
    assert fingerprint(*reversed(NAMED)) == found
    assert fingerprint(*((name.removeprefix("model."), tensor) for name, tensor in NAMED)) == found
    assert fingerprint(*((name, tensor.to(torch.bfloat16)) for name, tensor in NAMED)) == found
    more = [("layers.0.q_proj.weight", torch.randn(4, 4)), ("layers.0.q_norm.scale", torch.randn(2, 2))]
    assert fingerprint(*NAMED, *more, ("embed.bias", torch.ones(2))) == found


def test_another_model_has_another_fingerprint() -> None:
    """By a value of a norm, by a norm more, by its layers and heads."""
    trained = [(name, tensor + 0.5) for name, tensor in NAMED]
    fingerprints = {
        fingerprint(),
        fingerprint(*trained),
        fingerprint(NAMED[0]),
        fingerprint(*NAMED, ("layers.1.input_norm.weight", torch.ones(2))),
        fingerprint(num_layers=3),
        fingerprint(head_dim=8),
    }
    assert len(fingerprints) == 6


@pytest.mark.parametrize(
    ("name", "found"), [("layers.0.q_norm.weight", True), ("layers.0.q_proj.weight", False)]
)
def test_norms_are_known_by_their_names(name: str, found: bool) -> None:
    assert is_norm(name) is found
