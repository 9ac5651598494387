"""What a pass of ours gives vLLM's model, in the form that vLLM's own runners give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.model_inputs import ModelInputs

MAX_TOKENS = 64
WIDTH = 8


class Model(torch.nn.Module):
    """Embeds as vLLM's models do; `asked` has what it was asked with."""

    def __init__(self, *, raw: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, WIDTH, dtype=torch.float64)
        self.requires_raw_input_tokens = raw
        self.asked: list[dict[str, Any]] = []

    def embed_input_ids(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.asked.append(options)
        embedded: torch.Tensor = self.table(input_ids)
        return embedded


def arguments(model: Model, **options: Any) -> dict[str, Any]:
    """Of a pass over three tokens."""
    ids, positions = torch.tensor([3, 1, 2], dtype=torch.int32), torch.tensor([7, 8, 20])
    return inputs(model, **options).arguments(ids, positions)


def inputs(model: Model, *, media: bool = False, embeds: bool = False, rows: int = 0) -> ModelInputs:
    from kvshare.vllm_connector.worker.model_inputs import ModelInputs

    own = SimpleNamespace(
        supports_multimodal_inputs=media,
        enable_prompt_embeds=embeds,
        dtype=torch.float32,
        uses_mrope=rows > 0,
        mrope_num_dims=rows,
    )
    scheduler = SimpleNamespace(max_num_batched_tokens=MAX_TOKENS)
    config: Any = SimpleNamespace(model_config=own, scheduler_config=scheduler)
    return ModelInputs(model, config, torch.device("cpu"))


def test_a_model_of_text_gets_tokens() -> None:
    """And the positions as they are."""
    given = arguments(model := Model())
    assert given["input_ids"].tolist() == [3, 1, 2]
    assert given["positions"].tolist() == [7, 8, 20]
    assert (given["inputs_embeds"], model.asked) == (None, [])


@pytest.mark.parametrize(("options", "asked"), [({"media": True}, True), ({"embeds": True}, False)])
def test_a_model_that_may_get_embeddings_gets_nothing_else(options: dict[str, bool], asked: bool) -> None:
    """In the dtype of the model's batches. One that takes media is told that there are none."""
    model = Model()
    given = arguments(model, **options)
    assert given["input_ids"] is None
    assert given["inputs_embeds"].dtype == torch.float32
    assert torch.equal(given["inputs_embeds"], model.table(torch.tensor([3, 1, 2])).float())
    (told,) = model.asked
    assert bool(told) == asked
    if told:
        assert told["multimodal_embeddings"] == []
        assert told["is_multimodal"].tolist() == [False] * 3


def test_a_model_that_reads_tokens_too_gets_both() -> None:
    given = arguments(Model(raw=True), media=True)
    assert given["input_ids"].tolist() == [3, 1, 2]
    assert given["inputs_embeds"].shape == (3, WIDTH)


@pytest.mark.parametrize("rows", [3, 4])
def test_text_has_the_same_position_in_each_row(rows: int) -> None:
    """Rows lie as far apart as in vLLM's own buffer, since compiled models count on that."""
    positions = arguments(Model(), media=True, rows=rows)["positions"]
    assert positions.tolist() == [[7, 8, 20]] * rows
    assert positions.stride() == (MAX_TOKENS + 1, 1)


def test_a_pass_leaves_what_the_model_noted_of_the_batch_and_does_not_see_it() -> None:
    """Rows of each layer, and a count of them, as Gemma 4 and Qwen3-VL have; weights are none."""
    model: Any = Model()
    model.of_layers = torch.full((MAX_TOKENS, 2, WIDTH), 5.0)
    model.of_images = [torch.full((MAX_TOKENS, WIDTH), 7.0) for _ in range(2)]
    model.num_noted, model.scale = 9, torch.ones(1)
    made = inputs(model, media=True)
    with made.notes_set_aside(3):
        assert all((notes[:3] == 0).all() for notes in (model.of_layers, *model.of_images))
        assert (model.of_layers[3:] == 5).all()
        model.of_layers[:3], model.of_images[0][:3], model.num_noted = 1.0, 2.0, 0
    assert (model.of_layers == 5).all()
    assert all((notes == 7).all() for notes in model.of_images)
    assert (model.num_noted, model.scale.item(), model.table.weight.abs().max().item() > 0) == (9, 1.0, True)


def test_a_pass_without_adapters_gives_the_batch_its_own_back() -> None:
    """Also if the pass fails; where there was no batch before, nothing is given back."""
    from kvshare.vllm_connector.worker.model_inputs import base_model

    class Adapters:
        def __init__(self, mapping: object) -> None:
            self._adapter_manager = SimpleNamespace(_last_mapping=mapping)
            self.active: list[Any] = []

        def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
            assert requests == set()
            self.active.append(mapping)

    adapters = Adapters("of the batch")
    with pytest.raises(ZeroDivisionError), base_model(adapters, 5, 2):
        raise ZeroDivisionError
    during, after = adapters.active
    assert (during.index_mapping, during.prompt_mapping) == ((0,) * 5, (0,) * 2)
    assert after == "of the batch"
    first = Adapters(None)
    with base_model(first, 5, 2):
        assert len(first.active) == 1
    assert len(first.active) == 1


def test_parameters_without_values_are_left_out_of_the_digest() -> None:
    """vLLM does not load parts for media that it is told not to take."""
    from kvshare.vllm_connector.worker.model import weights_digest

    model = Model()
    before = weights_digest(model)
    model.tower = torch.nn.Linear(4, 4, device="meta")
    assert weights_digest(model) == before
    model.other = torch.nn.Linear(4, 4)
    assert weights_digest(model) != before
