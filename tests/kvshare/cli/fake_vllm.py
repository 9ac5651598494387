"""Small servers that answer as vLLM and as the connector in it do, or not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvshare import __version__
from kvshare.vllm_protocol.replica_info import ReplicaInfo

GIB = 2**30
MODEL = "some/model"
DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}}
INFO = ReplicaInfo(
    epoch="e1",
    model=MODEL,
    versions={"vllm": "0.32.0", "kvshare": __version__, "torch": "2.13.0"},
    refusals=(),
    warnings=(),
    can_move_keys=True,
    namespace_fields={"model": MODEL},
    bytes_per_token=1024,
    max_bytes=4 * GIB,
    num_bytes=GIB,
    num_segments=1234,
    max_model_len=4096,
    settings={
        "kv_load_failure_policy": "recompute",
        "worker_cls": "kvshare.vllm_connector.workers.KVShareWorker",
        "prefix_caching": True,
        "block_size": 16,
        "attention_backend": "CPU_ATTN",
    },
)

Route = tuple[int, Any]


@dataclass
class Fake:
    """
    A small server of JSON routes. One that is not there is 404, and with a `key` some do not go without it:
    vLLM guards its /v1 routes, the connector everything.
    """

    routes: dict[str, Route]
    key: str | None = None
    bodies: list[Any] = field(default_factory=list)
    url: str = ""
    name: str = "uvicorn"  # in the header Server

    def answer(self, handler: BaseHTTPRequestHandler) -> Route:
        size = int(handler.headers.get("Content-Length") or 0)
        if size:
            self.bodies.append(json.loads(handler.rfile.read(size)))
        guarded = handler.path.startswith(("/v1", "/info"))
        if guarded and self.key is not None and handler.headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        return self.routes.get(handler.path.partition("?")[0], (404, {"detail": "Not Found"}))


@contextmanager
def served(fake: Fake) -> Iterator[Fake]:
    """The fake on a free port of loopback; its `url` tells which."""

    class Handler(BaseHTTPRequestHandler):
        def version_string(self) -> str:
            return fake.name

        def do_GET(self) -> None:
            status, body = fake.answer(self)
            payload = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join(timeout=10)


def vllm(**routes: Route) -> Fake:
    """A healthy vLLM; `version=(status, body)` and the like change single answers."""
    answers: dict[str, Route] = {
        "health": (200, None),
        "version": (200, {"version": "0.32.0"}),
        "models": (200, {"object": "list", "data": [{"id": "served", "root": MODEL}]}),
        "completions": (200, {"usage": {"prompt_tokens": 1, **DETAILS}}),
        "render": (200, [{"token_ids": [1]}]),
    } | routes
    paths = {
        "models": "/v1/models",
        "completions": "/v1/completions",
        "render": "/v1/completions/render",
    }
    return Fake({paths.get(name, f"/{name}"): route for name, route in answers.items()})


def connector(info: ReplicaInfo = INFO, **changes: Any) -> Fake:
    """The control server of a connector."""
    return Fake({"/info": (200, {**info.to_json(), **changes})})
