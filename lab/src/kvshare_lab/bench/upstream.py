"""
A model server without a model, for benchmarks of the relay: `python -m kvshare_lab.bench.upstream PORT`.

It answers at once; a body with "slow" gets an endless stream with a token every ten seconds.
"""

import asyncio
import json
import sys

from aiohttp import web

from kvshare.cli.open_files import raise_open_files

MODEL = "bench"
SLOW_TOKEN_S = 10.0
_BACKLOG = 2048
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": MODEL}


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})


async def chat(request: web.Request) -> web.StreamResponse:
    """An answer, or a stream that goes on until the client disconnects."""
    if not (await request.json()).get("slow"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        return web.json_response({**_HEAD, "object": "chat.completion", "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    part = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    frame = json.dumps({**_HEAD, "object": "chat.completion.chunk", "choices": [part]})
    while True:
        await response.write(f"data: {frame}\n\n".encode())
        await asyncio.sleep(SLOW_TOKEN_S)


def main() -> None:
    raise_open_files()
    app, port = web.Application(), int(sys.argv[1])
    routes = [web.get("/health", health), web.get("/v1/models", models)]
    app.add_routes([*routes, web.post("/v1/chat/completions", chat)])
    web.run_app(app, host="127.0.0.1", port=port, backlog=_BACKLOG, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
