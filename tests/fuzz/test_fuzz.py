"""
schemathesis against both engines' fronts: inputs made from `/openapi.json`, right and wrong ones.

None may end in a 5xx, in a status or a media type that is not documented, or in a body of another shape, an
error's included. `make fuzz` runs this with 10,000 inputs for each engine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare_lab.bench.harness import bench_settings
from proxy.app import serve
from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.relay.relay_server import running_relay

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "300"))
SEED = os.environ.get("FUZZ_SEED", "1")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "allow_header_conformance"),
)
PROGRAM = shutil.which(
    "schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed: make fuzz"),
]


@pytest.mark.model
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_the_embedded_engine(tmp_path: Path) -> None:
    """The bundled model, with sharing, over real sockets."""
    # A short context: what asks for no limit of tokens must not compute for minutes.
    short = {"server.port": 0, "index.dense": False, "model.max_model_len": 512}
    settings = bench_settings(str(tmp_path), short)
    engine = EmbeddedEngine(settings)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(settings, engine, on_listening=lambda url: None, on_ready=ready.set_result)
    )
    try:
        either: list[asyncio.Future[Any]] = [ready, task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await fuzz(await ready, tmp_path, model=engine.card.model_id, checks=(*CHECKS, "unsupported_method"))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_relay(tmp_path: Path) -> None:
    """The relay, which passes any method on, before a server that refuses what it cannot read."""
    async with running(StrictVllm()) as vllm, running_relay(tmp_path, vllm) as relay:
        await fuzz(relay.url, tmp_path, model=MODEL, checks=CHECKS)


class StrictVllm(FakeVllm):
    """Answers 400 where a prompt cannot be read."""

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await super()._tokenize(request) if await self._is_readable(request) else refusal()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await super()._generate(request) if await self._is_readable(request) else refusal()

    async def _is_readable(self, request: web.Request) -> bool:
        try:
            return all(isinstance(token, int) for token in self.tokens_of(await request.json()))
        except (KeyError, TypeError, AttributeError, ValueError):
            return False


def refusal() -> web.Response:
    return web.json_response({"error": {"message": "no", "code": 400}}, status=400)


@asynccontextmanager
async def running(vllm: FakeVllm) -> AsyncIterator[FakeVllm]:
    await vllm.start()
    try:
        yield vllm
    finally:
        await vllm.stop()


async def fuzz(url: str, folder: Path, *, model: str, checks: Sequence[str]) -> None:
    """Run schemathesis; fails with its report, which has a curl command for each finding."""
    assert PROGRAM is not None
    num_operations = await count_operations(url)
    arguments = ["run", f"{url}/openapi.json", "--checks", ",".join(checks), "--seed", SEED, "--no-color"]
    arguments += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
    arguments += ["--max-examples", str(max(1, NUM_INPUTS // num_operations)), "--request-timeout", "300"]
    hooks = Path(__file__).with_name("hooks.py")
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *arguments,
        cwd=folder,  # it writes what it found
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(hooks), "FUZZ_MODEL": model},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    report, _ = await process.communicate()
    assert process.returncode == 0, report.decode()[-20_000:]


async def count_operations(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
        return sum(len(methods) for methods in (await response.json())["paths"].values())
