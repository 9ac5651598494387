"""The command line, here or as a process, a real stopped store, and a real server of the admin routes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from delta_tree import DeltaTree
from kvshare.cli import main, output
from kvshare.errors import RequestError
from tests.kvshare.admin.documents import document_of
from tests.kvshare.cli.fake_vllm import served
from tests.kvshare.cli.family import IDENTITY, Family, grow, write_store
from tests.kvshare.cli.findings import Start
from tests.kvshare.cli.installation import Installation
from tests.kvshare.cli.live_replays import FORM
from tests.kvshare.cli.outcome import TIMEOUT_S, Outcome
from tests.kvshare.replay.tiny_engine import TinyEngine, running

ADMIN_KEY = "admin-key"
MODEL = "served-model"

Cli = Callable[..., Outcome]
Kvshare = Callable[..., Outcome]  # in this process


@pytest.fixture
def process(tmp_path: Path) -> Cli:
    """Runs `kvshare` with these arguments in an empty folder, without the caller's KVSHARE_ variables."""

    def run(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHARE_")}
        done = subprocess.run(
            [sys.executable, "-m", "kvshare.cli.main", *map(str, arguments)],
            input=stdin,
            env={**clean, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


class Stdin(io.BytesIO):
    """With the name that a process's has, for messages."""

    name = "<stdin>"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The same in this process: as real, and ten times faster, as a process imports for seconds."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVSHARE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["kvshare", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(Stdin(stdin.encode())))
            patch.setattr(output, "_quiet", False)  # which -q changes
            with pytest.raises(SystemExit) as ended:
                main.main()
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    return run


@pytest.fixture
def kvshare(cli: Cli) -> Kvshare:
    """The same, for tests without an environment and without input."""
    return cli


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a stopped server left its metadata."""
    return tmp_path / "store"


@pytest.fixture
def family(store: Path) -> Family:
    """What is in it."""
    return write_store(store)


@dataclass(frozen=True, slots=True)
class Running:
    """A server with the family in memory, and what it was asked to explain."""

    url: str
    family: Family
    tree: DeltaTree
    explained: list[dict[str, Any]]


EXPLANATION = {
    "decision": "approx",
    "reason": "deviates_too_much",
    "cache_miss_reason": {"type": "deviates_too_much", "message": "Put what changes near the end."},
    "rules": ["clock", "nonce"],
    "planned_for": {"tenant": "north-america", "key": "chatbot-1"},
    "mode": "approx",
    "num_tokens": 100,
    "exact": 40,
    "copied": 30,
    "recomputed": 20,
    "repaired": 10,
    "charged_budget": 0.3,
    "spans": [
        {"start": 0, "end": 40, "kind": "exact", "donor": 7, "shift": 0},
        {"start": 40, "end": 60, "kind": "placeholder", "donor": None, "shift": None},
        {"start": 60, "end": 70, "kind": "repair", "donor": None, "shift": None},
        {"start": 70, "end": 100, "kind": "copied", "donor": 7, "shift": -3},
    ],
    "donors": [
        {
            "node": 7,
            "sources": ["prefix"],
            "score": 1.0,
            "similarity": None,
            "tokens_used": 70,
            "outcome": "used",
        }
    ],
    "estimate": {"full_s": 2.0, "shared_s": 0.6, "saved_s": 1.4},
    "stage_ms": {"search": 0.4},
}


@pytest.fixture
def server() -> Iterator[Running]:
    """The admin routes over `kvshare.admin`, in a thread of its own."""
    tree = DeltaTree.open(None, identity=IDENTITY)
    family = grow(tree)
    explained: list[dict[str, Any]] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    address: list[str] = []

    async def serve() -> web.AppRunner:
        runner = web.AppRunner(admin_app(tree, explained))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def live() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(serve())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    assert started.wait(timeout=60)
    yield Running(address[0], family, tree, explained)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    tree.close()


def admin_app(tree: DeltaTree, explained: list[dict[str, Any]]) -> web.Application:
    """The routes that the HTTP front has, with its error bodies."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {ADMIN_KEY}":
            return refusal(401, "Incorrect or missing API key.")
        try:
            answer: web.StreamResponse = await handler(request)
        except RequestError as exc:
            return refusal(400, str(exc))
        return answer

    def question(what: str) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            arguments = await request.json() if request.method == "POST" else request.query
            return web.json_response(document_of(tree, what, {**arguments, **request.match_info}))

        return handler

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def explain(request: web.Request) -> web.Response:
        explained.append(await request.json())
        return web.json_response(EXPLANATION)

    app = web.Application(middlewares=[guarded])
    app.router.add_get("/v1/models", models)
    app.router.add_get("/admin/stats", question("stats"))
    app.router.add_get("/admin/tree", question("tree"))
    app.router.add_get("/admin/node/{id}", question("node"))
    app.router.add_get("/admin/diff", question("diff"))
    app.router.add_post("/admin/evict", question("evict"))
    app.router.add_post("/admin/explain", explain)
    return app


def refusal(status: int, message: str) -> web.Response:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts small servers, and ends them."""
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(served(fake))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Four prompts of one form among seven rows that are broken."""
    rows = [json.dumps({"prompt": f"{FORM} for {name}"}) for name in ("Anna", "Bert", "Cid", "Anna")]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([rows[0], *["{broken"] * 7, *rows[1:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    with running(TinyEngine()) as engine:
        yield engine


@pytest.fixture
def bare(tmp_path: Path) -> Installation:
    """An installation without vLLM's program, and with the packages of this one."""
    return Installation.create(tmp_path / "python")


@pytest.fixture
def installed(bare: Installation) -> Installation:
    """An installation with a vLLM of a tested version."""
    bare.put_package("0.32.1")
    bare.put_program()
    return bare
