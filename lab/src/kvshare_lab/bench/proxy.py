"""
`kvshare bench proxy`: what the HTTP front and sharing add to a request with nothing to share, part by part.

Prompts of one length are sent through HTTP on loopback, each unlike the others. What a request takes besides
its own forward pass is what was added. The pass is timed in the request itself: one of another thread has
threads of torch's own, and differs by milliseconds. The parts, in the order of a request:

    http_in     the client sends it; aiohttp reads it, and calls the middleware
    body        the key, limits, JSON, a check of each field
    tokens      the chat template and the tokenizer
    admission   options, the namespace, the controller, a slot
    lookup      the search for donors, which finds none
    begin       to the thread that computes, until its pass begins
    token       after the pass: the first token, the release, back on the event loop
    answer      the document of the answer
    http_out    aiohttp sends it
    counting    metrics, usage, history and the log: a client in another process does not wait for them
    client      the client reads it

`hop_ms`: a bare aiohttp server in this process gets the same bodies and gives the same answers, in turns with
the requests. That is what HTTP and its client take; client and servers share one thread.
Embedding is off, and each prompt is stored before the next is sent: both happen after the response.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from inspect import iscoroutinefunction
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvshare.collector import keep_freed_memory, make_collections_rare, take_short_turns
from kvshare.embedded.engine import EmbeddedEngine
from kvshare_lab.bench.harness import Client, median, serving, timed
from proxy import middleware
from proxy.generate import run as run_of_answers

_WARM_UP = 5
_PATH = "/v1/chat/completions"
_PASS = "pass"
_ENDS = {  # the parts of a request, and the point that ends each
    "http_in": "received",
    "body": "encoding",
    "tokens": "encoded",
    "admission": "searching",
    "lookup": "found",
    "begin": "computing",
    _PASS: "computed",
    "token": "finished",
    "answer": "written",
    "http_out": "sent_back",
    "counting": "counted",
    "client": "answered",
}


async def run(*, repeats: int = 100, words: int = 60, seed: int = 0) -> dict[str, Any]:
    """Median added milliseconds over `repeats` chat requests that have nothing in common."""
    rng = np.random.default_rng(seed)
    parts: list[dict[str, float]] = []
    hops: list[float] = []
    async with serving({"index.dense": False}) as (client, engine), _bare_server() as (bare, echo):
        make_collections_rare()  # as `kvshare serve` does once it is ready
        take_short_turns()
        keep_freed_memory()
        with _noted(engine) as points:
            for _ in range(repeats + _WARM_UP):
                text = " ".join(f"{value:x}" for value in rng.integers(0, 2**32, words))
                points.clear()
                points["sent"] = time.perf_counter()
                answer = await _ask(client, engine.card.model_id, text)
                points["answered"] = time.perf_counter()
                parts.append(_parts(points))
                await engine.settle()
                echo(answer)
                _, hop_s = await timed(_ask(bare, engine.card.model_id, text))
                hops.append(hop_s)
    return {
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        **_medians(parts[_WARM_UP:]),
        "hop_ms": 1e3 * median(hops[_WARM_UP:]),
    }


def _parts(points: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each part of a request."""
    return {
        name: points[end] - points[before]
        for (_, before), (name, end) in pairwise([("", "sent"), *_ENDS.items()])
    }


def _medians(parts: list[dict[str, float]]) -> dict[str, Any]:
    through = [sum(each.values()) for each in parts]
    added = [sum(each.values()) - each[_PASS] for each in parts]
    of_parts = {name: 1e3 * median([each[name] for each in parts]) for name in _ENDS}
    return {
        "added_ms": 1e3 * median(added),
        "through_http_p50_ms": 1e3 * median(through),
        "in_model_p50_ms": of_parts.pop(_PASS),
        "parts_ms": of_parts,
    }


async def _ask(client: Client, model: str, text: str) -> dict[str, Any]:
    """The answer to one chat request."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    async with client.post(_PATH, json=body) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


@asynccontextmanager
async def _bare_server() -> AsyncIterator[tuple[Client, Callable[[dict[str, Any]], None]]]:
    """A server that reads bodies, and its answer. Yields its client, and what sets the answer."""
    document: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(document)

    app = web.Application()
    app.router.add_post(_PATH, answer)
    async with TestClient(TestServer(app)) as client:
        yield client, document.update


@contextmanager
def _noted(engine: EmbeddedEngine) -> Iterator[dict[str, float]]:
    """When the last request came to each point, while inside."""
    points: dict[str, float] = {}
    places: list[tuple[Any, str, str, str]] = [
        (middleware, "check_expectation", "received", ""),
        (engine, "encode_chat", "encoding", "encoded"),
        (engine.sharing, "find_plan", "searching", "found"),
        (engine.server.shared_model, "compute", "computing", "computed"),
        (engine, "generate", "", "finished"),
        (run_of_answers, "dump", "", "written"),
        (web.Response, "write_eof", "", "sent_back"),
        (middleware, "log_request", "", "counted"),
    ]
    with ExitStack() as patched:
        for where, name, before, after in places:
            noting = _noting(getattr(where, name), points, before, after)
            patched.enter_context(patch.object(where, name, noting))
        yield points


def _noting(
    function: Callable[..., Any], points: dict[str, float], before: str, after: str
) -> Callable[..., Any]:
    """The same function, which notes when it is called and when it has returned."""

    def called(*given: Any, **options: Any) -> Any:
        points.setdefault(before, time.perf_counter())
        result = function(*given, **options)
        points[after] = time.perf_counter()
        return result

    async def awaited(*given: Any, **options: Any) -> Any:
        points.setdefault(before, time.perf_counter())
        result = await function(*given, **options)
        points[after] = time.perf_counter()
        return result

    return awaited if iscoroutinefunction(function) else called
