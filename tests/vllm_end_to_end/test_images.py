"""Chats with images: a real `vllm serve` with a tiny random LLaVA, the real proxy and the real client."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest

from kvshare_lab.vllm.absent_torchvision import FOLDER
from kvshare_lab.vllm.kinds import write_kind
from kvshare_lab.vllm.processors import IMAGE_SIZE
from kvshare_lab.vllm.servers import VllmOptions, new_token, running, shared_vllm
from tests.vllm_end_to_end.fleet import MODEL, Fleet, proxy_with_keys, rested, settled, wait_connected


@dataclass(frozen=True)
class Reply:
    text: str
    num_tokens: int  # of the prompt
    num_cached: int


@pytest.fixture(scope="module")
def illustrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One vLLM that takes images, and the proxy before it."""
    folder, token = tmp_path_factory.mktemp("images"), new_token()
    model = write_kind("llava", folder / "llava")
    options = VllmOptions(
        dtype="float32", max_model_len=1024, max_num_batched_tokens=1024, enforce_eager=True
    )
    (folder / "one").mkdir()
    replica = shared_vllm(model, folder / "one", options, kv_bytes=1 << 28, token=token)
    replica.environment = {**replica.environment, "PYTHONPATH": str(FOLDER)}
    proxy = proxy_with_keys([replica], folder, token)
    with running([replica]), running([proxy]):
        wait_connected(proxy, [replica])
        yield Fleet((replica, replica), proxy)


def pixels(seed: int) -> str:
    """A random image, as a client sends it."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(colours).save(file, "png")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def words(length: int, seed: int) -> str:
    """One token each: in front of others the tokenizer sees its special token `w2`."""
    return " ".join(f"w{index}" for index in np.random.default_rng(seed).integers(100, 190, length))


def ask(client: openai.OpenAI, *parts: str | int, **own: Any) -> Reply:
    """Text, and images by their seeds. All of them have the same id."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": pixels(part)}, "uuid": "cat"}
        for part in parts
    ]
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]  # with ids
        temperature=0,
        max_tokens=8,
        extra_body={"kvshare": own} if own else None,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    return Reply(reply.choices[0].message.content or "", reply.usage.prompt_tokens, cached)


def test_an_image_is_shared_by_what_it_shows(illustrated: Fleet) -> None:
    """
    Behind another beginning most of the prompt is not computed, the image among it. Another image of the same
    size and with the same id from the client is answered from itself.
    """
    begins, other_begins = words(40, 1), words(45, 2)
    before, after = words(150, 3), words(300, 4)
    with illustrated.client("ann") as ann:
        nodes = rested(illustrated)
        donor = ask(ann, begins, before, 7, after)
        settled(illustrated, nodes)
        moved = ask(ann, other_begins, before, 7, after)
        assert moved.num_tokens == donor.num_tokens + 5
        assert moved.num_cached > 0.6 * moved.num_tokens, illustrated.why()
        other = ask(ann, begins, before, 8, after)
        assert other.text == ask(ann, begins, before, 8, after, mode="off").text
        assert other.num_cached <= 200
        assert other.text != donor.text
