"""
Prompts of a soak as chats with images, for a model that reads them: some of the tokens stand for an image,
the others for words of the tokenizer in processors.py.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare_lab.vllm.kinds import MAX_IMAGES
from kvshare_lab.vllm.processors import IMAGE_SIZE, TOKENS_OF_AN_IMAGE

ROOM = MAX_IMAGES * TOKENS_OF_AN_IMAGE + 16  # tokens by which a chat is longer than its prompt, at most
_EVERY = 128  # of the vocabulary, a token is an image
_IMAGES = 5  # different ones
_FIRST_WORD, _WORDS = 100, 90  # `w100` to `w189`: the tokenizer sees special tokens in shorter ones


def illustrated(prompt: TokenIds) -> Sequence[Mapping[str, Any]]:
    """The content of a message: equal tokens are equal words or images, until the most images are reached."""
    parts: list[str | int] = []
    num_images = 0
    for token in prompt.tolist():
        if token % _EVERY == 0 and num_images < MAX_IMAGES:
            parts.append(token // _EVERY % _IMAGES)
            num_images += 1
            continue
        word = f"w{_FIRST_WORD + token % _WORDS}"
        if parts and isinstance(parts[-1], str):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": _pixels(part)}}
        for part in parts
    ]


@cache
def _pixels(seed: int) -> str:
    """A random image, as a client sends it."""
    from PIL import Image  # it comes with vLLM

    colours = np.random.default_rng(seed).integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(colours).save(file, "png")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
