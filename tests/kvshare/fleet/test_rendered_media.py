"""Which media vLLM has found in a prompt: read whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from delta_tree import Span
from kvshare.fleet.rendered_media import read_media
from kvshare.vllm_protocol.media import Medium


def features(*images: tuple[object, object, object], **more: object) -> dict[str, Any]:
    """Images (digest, offset, length), as vLLM writes them."""
    return {
        "mm_hashes": {"image": [digest for digest, _, _ in images]},
        "mm_placeholders": {"image": [{"offset": start, "length": length} for _, start, length in images]},
        **more,
    }


@pytest.mark.parametrize("found", [None, {}, [], "", 0])
def test_a_text_has_none(found: object) -> None:
    assert read_media(found) == ()


def test_images_are_read_in_the_order_of_their_positions() -> None:
    """Whatever order vLLM lists them in; what else it says of them does not matter."""
    found = features(("b", 50, 10), ("a", 0, 20), kwargs_data={"image": [None, None]})
    assert read_media(found) == (Medium(Span(0, 20), "a"), Medium(Span(50, 60), "b"))


def test_images_may_touch_and_may_be_the_same() -> None:
    """Two of the same picture, one right after the other."""
    assert read_media(features(("a", 0, 8), ("a", 8, 8))) == (
        Medium(Span(0, 8), "a"),
        Medium(Span(8, 16), "a"),
    )


def test_modalities_without_an_entry_do_not_count() -> None:
    found = features(("a", 3, 4))
    found["mm_hashes"]["audio"] = []
    found["mm_placeholders"]["video"] = []
    assert read_media(found) == (Medium(Span(3, 7), "a"),)


@pytest.mark.parametrize(
    "found",
    [
        features(("a", 0, 8), ("b", 7, 8)),  # one token for two
        features(("a", 0, 8), ("b", 0, 8)),
        features(("a", -1, 8)),
        features(("a", 0, 0)),
        features(("a", 0, -3)),
        features(("a", True, 8)),
        features(("a", 0, True)),
        features(("a", 0.0, 8)),
        features(("a", "0", 8)),
        features(("a", None, 8)),
        features((3, 0, 8)),
        features((None, 0, 8)),
        features(("a", 0, 8), (None, 20, 8)),  # one of two is not understood
        features(),
        {**features(("a", 0, 8)), "mm_hashes": {"image": ["a", "b"]}},
        {**features(("a", 0, 8)), "mm_hashes": {"image": "a"}},
        {**features(("a", 0, 8)), "mm_hashes": {}},
        {**features(("a", 0, 8)), "mm_hashes": ["a"]},
        {**features(("a", 0, 8)), "mm_placeholders": None},
        {**features(("a", 0, 8)), "mm_placeholders": {"image": [[0, 8]]}},
        {**features(("a", 0, 8)), "mm_hashes": {"image": ["a"], "audio": ["b"]}},
        {**features(("a", 0, 8)), "mm_placeholders": {"image": [{"offset": 0, "length": 8}], "video": [{}]}},
        {"mm_hashes": {"audio": ["a"]}, "mm_placeholders": {"audio": [{"offset": 0, "length": 8}]}},
        {"mm_hashes": {"image": ["a"]}},
        ["image"],
        "image",
        3,
    ],
)
def test_what_is_not_understood_is_none_of_them(found: object) -> None:
    """Two images have the same tokens, so a guess could give one the KV of the other."""
    assert read_media(found) is None
