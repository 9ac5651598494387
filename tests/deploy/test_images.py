"""The recipes of the images, run step by step: what they install starts, is healthy, answers, and ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from kvshare_lab.vllm.ports import free_ports
from run_recipe import Image, build
from tests.deploy.containers import DEPLOY, IMAGES
from tests.fake_vllm import MODEL, running_vllm

START_S = 300  # a busy machine imports torch for minutes

pytestmark = pytest.mark.long


def built(image: str, root: Path) -> Image:
    return build(DEPLOY / IMAGES[image], Image(root))


@asynccontextmanager
async def started(image: Image, *command: str, **variables: str) -> AsyncIterator[str]:
    """The address of its process, once its own health check passes; at the end it gets its signal."""
    port = str(free_ports(1)[0])
    environment = image.process_environment(KVSHARE_SERVER__PORT=port, **variables)
    words = [*image.entrypoint, *(command or image.command)]
    program = shutil.which(words[0], path=environment["PATH"])
    assert program is not None
    assert program.startswith(str(image.root))
    process = await asyncio.create_subprocess_exec(program, *words[1:], env=environment, cwd=image.at("."))
    try:
        url = f"http://127.0.0.1:{port}"
        await answers(f"{url}/health")
        async with asyncio.timeout(START_S):
            while not await is_healthy(image, environment):  # noqa: ASYNC110  it does not say when
                await asyncio.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            assert await process.wait() == 0


async def answers(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(START_S):
        while True:
            try:
                async with http.get(url) as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.2)


async def is_healthy(image: Image, environment: dict[str, str]) -> bool:
    """What Docker would ask."""
    program = shutil.which(image.healthcheck[0], path=environment["PATH"])
    assert program is not None
    check = await asyncio.create_subprocess_exec(
        program, *image.healthcheck[1:], env=environment, stderr=subprocess.DEVNULL
    )
    return await check.wait() == 0


async def answer(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.text()


async def test_the_proxy_is_installed_and_serves(tmp_path: Path) -> None:
    """In front of a vLLM that shares: healthy when it is ready, and no torch."""
    image = built("kvshare-proxy", tmp_path)
    assert [step.split()[1] for step in image.left_out] == ["useradd"]
    assert not list((tmp_path / "opt/kvshare/lib").glob("python*/site-packages/torch"))
    async with running_vllm() as vllm:
        replicas = yaml.safe_dump([vllm.settings], default_flow_style=True)
        own = {"KVSHARE_VLLM__REPLICAS": replicas, "KVSHARE_COST__MEASURE_AT_START": "false"}
        async with started(image, **own) as url:
            await answer(url, MODEL)
    assert len(vllm.generated) == 1
    assert (tmp_path / "var/lib/kvshare/tree.sqlite3").exists()


async def test_the_image_for_cpus_is_installed_and_serves(tmp_path: Path) -> None:
    """With the forms model, which is part of it; the default one is downloaded."""
    image = built("kvshare", tmp_path)
    assert image.command == ["serve", "--model", "default"]
    async with started(image, "serve", "--model", "demo") as url:
        assert "kvshare-demo" in await answer(url, "kvshare-demo")
    assert (tmp_path / "var/lib/kvshare/store/tree.sqlite3").exists()


def test_the_wheel_for_vllm_is_built(tmp_path: Path) -> None:
    """The rest of that recipe is on vLLM's image, which is not here."""
    image = built("kvshare-vllm", tmp_path)
    assert [path.name.split("-")[0] for path in (tmp_path / "wheel").iterdir()] == ["kvshare"]
    assert image.left_out == ["FROM vllm/vllm-openai:v0.32.0 and what follows"]
