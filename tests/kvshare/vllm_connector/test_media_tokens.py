"""Which tokens of a model mark media."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("qwen3-vl", {290, 291, 292, 293}),
        ("glm4v", {290, 291, 292, 293, 294, 295}),
        ("gemma3-mm", {290, 291, 292}),
        ("llava", {290}),
    ],
)
def test_tokens_that_mark_media_are_read_from_the_model(name: str, ids: set[int]) -> None:
    """However its family calls them; the same model without media has none."""
    from kvshare.vllm_connector.scheduler.models_with_media import media_tokens
    from kvshare_lab.vllm.kinds import config_of

    model = SimpleNamespace(hf_config=config_of(name), is_multimodal_model=True)
    assert media_tokens(model) == ids
    model.is_multimodal_model = False
    assert media_tokens(model) == set()


def test_tokens_that_mark_media_may_be_those_of_a_part() -> None:
    """Omni models have them in the configuration of their thinker; widths and counts are none."""
    from transformers import AutoConfig

    from kvshare.vllm_connector.scheduler.models_with_media import media_tokens

    config = AutoConfig.for_model("qwen2_5_omni")
    thinker = config.thinker_config
    found = media_tokens(SimpleNamespace(hf_config=config, is_multimodal_model=True))
    assert {thinker.image_token_id, thinker.video_token_id, thinker.audio_token_id} <= found
    assert not found & {thinker.text_config.hidden_size, thinker.text_config.eos_token_id}
