"""`kvshare warm`, `pin` and `unpin` on a real server with the forms model and a small memory for KV."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.served import Served, eventually, serving
from tests.proxy.conftest import eventually as soon
from tests.proxy.conftest import running_server
from tests.proxy.fake_engine import Behaviour

BYTES_PER_TOKEN = 9216  # of the forms model
CAPACITY = 2000  # tokens
CONFIG = f"store: {{kv_bytes: {CAPACITY * BYTES_PER_TOKEN}, disk_bytes: 0}}\n"
WORDS = (
    "window",
    "garden",
    "river",
    "seven",
    "north",
    "paper",
    "blue",
    "morning",
    "stone",
    "letter",
    "under",
)
with_model = pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), config=CONFIG) as running:
        yield running


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    """Nothing is stored when a test begins."""
    if "server" in request.fixturenames:
        served: Served = request.getfixturevalue("server")
        served.post("/admin/evict", {"all": True, "dry_run": False})


def document_of(seed: int, num_words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def shared(server: Served, text: str) -> dict[str, Any]:
    """What a user's chat has of others; it leaves nothing behind."""
    model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
    body = {**chat(text), "model": model, "max_tokens": 2, "kvshare": {"mode": "approx", "no_store": True}}
    usage: dict[str, Any] = server.post("/v1/chat/completions", body)["usage"]["kvshare"]
    return usage


def fill(server: Served, num_prompts: int = 16) -> None:
    """More than the memory holds, of what is not pinned."""
    for seed in range(num_prompts):
        tokens = random.Random(seed).choices(range(300, 1500), k=300)
        server.complete(tokens, kvshare={"mode": "exact"})


def write_rows(path: Path, *rows: object) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_the_first_user_finds_a_warmed_document(cli: Cli, server: Served, tmp_path: Path) -> None:
    """At another place than where it was stored, behind other text; a warmed chat is an exact prefix."""
    text = document_of(1, 120)
    (tmp_path / "house.md").write_text(text, encoding="utf-8")
    rows = write_rows(tmp_path / "rows.jsonl", {**chat(document_of(2)), "label": "second"})
    asked = f"Read this. {text} What is it about?"
    assert shared(server, asked)["decision"] == "full"
    outcome = cli("warm", "house.md", rows, "--url", server.url, "--json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.document
    assert (document["entries"], document["stored"], document["known"], document["failed"]) == (2, 2, 0, 0)
    assert [prompt["label"] for prompt in document["prompts"]] == [None, "second"]
    found = shared(server, asked)
    assert found["decision"] == "approx"
    assert found["copied"] > 100
    assert shared(server, document_of(2))["decision"] == "exact"

    again = cli("warm", "house.md", rows, "--url", server.url, "--json").document
    assert (again["stored"], again["known"], again["computed"]) == (0, 2, 2)
    assert [entry["node"] for entry in again["prompts"]] == [entry["node"] for entry in document["prompts"]]


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_a_running_server_names_whose_prompts_are(cli: Cli, server: Served, tmp_path: Path) -> None:
    """Next to the digests, in `stats` and `tree`; without keys all are one tenant's."""
    server.complete(range(300, 400))
    eventually(lambda: "owners" in server.get("/admin/stats")[1])
    (digest,) = json.loads(server.get("/admin/stats")[1])["owners"]
    assert f"{digest[:12]}: tenant local" in cli("stats", "--url", server.url).stdout
    assert f"namespace {digest[:12]}: tenant local" in cli("tree", "--url", server.url).stdout


@with_model
def test_a_pinned_prompt_outlasts_a_full_store(cli: Cli, server: Served, tmp_path: Path) -> None:
    """It is shared as ever, and what was stored beside it is gone; unpinned, it leaves in its turn."""
    rows = write_rows(tmp_path / "rows.jsonl", chat(document_of(1)))
    others = write_rows(tmp_path / "others.jsonl", chat(document_of(2)))
    pinned = cli("warm", rows, "--url", server.url, "--pin", "--json").document
    assert (pinned["pinned"], pinned["failed"]) == (1, 0)
    node = pinned["prompts"][0]["node"]
    assert cli("warm", others, "--url", server.url).code == 0
    fill(server)
    assert shared(server, document_of(1))["decision"] == "exact"
    assert shared(server, document_of(2))["exact"] < 30  # what every chat begins with
    stats = cli("stats", "--url", server.url, "--format", "json").document
    assert stats["totals"]["num_pinned"] == 1
    assert 0 < stats["pins"]["num_bytes"] <= stats["pins"]["max_bytes"] == CAPACITY * BYTES_PER_TOKEN // 2

    refused = cli("evict", node, "--url", server.url)
    assert (refused.code, "pinned" in refused.stderr) == (1, True)
    assert cli("unpin", node, "--url", server.url).stdout.startswith("unpinned 1 prompt,")
    fill(server)
    assert cli("node", node, "--url", server.url).code == 1


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_no_more_than_half_of_the_memory_is_pinned(cli: Cli, server: Served, tmp_path: Path) -> None:
    """What is beyond is stored, not pinned, and said by its line; a namespace goes whole or not at all."""
    rows = write_rows(tmp_path / "rows.jsonl", *(chat(document_of(seed, 150)) for seed in range(6)))
    outcome = cli("warm", rows, "--url", server.url, "--pin", "--concurrency", 1, "--json")
    document = outcome.document
    assert outcome.code == 1
    assert document["stored"] == 6
    assert document["pinned"] == 6 - document["failed"] > 0
    assert {failure["reason"] for failure in document["failures"]} == {"too_much_pinned"}

    stats = cli("stats", "--url", server.url, "--format", "json").document
    (namespace,) = (row["namespace"] for row in stats["namespaces"])
    refused = cli("pin", "--namespace", namespace[:8], "--url", server.url)
    assert refused.code == 1
    assert "kvshare vllm --kv-bytes" in refused.stderr
    assert (
        cli("unpin", "--all", "--url", server.url, "--format", "json").document["num_nodes"]
        == document["pinned"]
    )
    one = document["prompts"][-1]["node"]
    assert cli("pin", one, "--url", server.url, "--format", "json").document["num_nodes"] == 1
    assert "pinned" in cli("tree", one, "--url", server.url).stdout


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_dropping_everything_drops_what_is_pinned(cli: Cli, server: Served, tmp_path: Path) -> None:
    """After --yes: the next warming finds nothing, and may pin as much again."""
    rows = write_rows(tmp_path / "rows.jsonl", chat(document_of(1)))
    for _ in range(2):
        document = cli("warm", rows, "--url", server.url, "--pin", "--json").document
        assert (document["stored"], document["pinned"]) == (1, 1)
        assert (
            cli("evict", "--all", "--yes", "--url", server.url, "--format", "json").document["num_nodes"] == 1
        )
        assert json.loads(server.get("/admin/stats")[1])["pins"]["num_bytes"] == 0


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_what_fails_is_named_by_line_and_the_rest_is_stored(cli: Cli, server: Served, tmp_path: Path) -> None:
    """Malformed, too long and too short; the table and the JSON have no text, and the exit code is 1."""
    rows = write_rows(
        tmp_path / "rows.jsonl",
        "SECRET is no JSON",
        {**chat(document_of(1)), "label": "[bold]mine[/]"},
        chat("SECRET " * 5000),
        {"prompt": "SECRET"},
        {**chat("SECRET"), "model": "another"},
    )
    outcome = cli("warm", rows, "--url", server.url, "--pin")
    assert outcome.code == 1
    lines = [line.split() for line in outcome.stdout.splitlines()]
    for number, reason in ((1, "bad_json"), (3, "context_length_exceeded"), (4, "short_prompt")):
        assert [str(rows), str(number), reason] in lines
    assert "[bold]mine[/]" in outcome.stdout
    assert "SECRET" not in outcome.stdout + outcome.stderr
    assert cli("warm", rows, "--url", server.url, "--json").document["known"] == 1


@pytest.mark.slow
@pytest.mark.model
@with_model
def test_more_than_the_memory_holds_is_said(cli: Cli, server: Served, tmp_path: Path) -> None:
    """All were stored, and the first have left for the last."""
    rows = write_rows(tmp_path / "rows.jsonl", *(chat(document_of(seed, 250)) for seed in range(8)))
    outcome = cli("warm", rows, "--url", server.url, "--concurrency", 1, "--json")
    assert outcome.code == 0
    assert outcome.document["stored"] == 8
    assert 0 < outcome.document["evicted"] < 8
    assert "too small" in outcome.stderr


async def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    """What was finished is counted, what was under way is given up, and the exit code is the shell's."""
    write_rows(tmp_path / "rows.jsonl", *(chat(document_of(seed)) for seed in range(50)))
    async with running_server(Behaviour(prefill_s=0.5)) as server:
        command = ("-m", "kvshare.cli.main", "warm", "rows.jsonl", "--url", server.url, "--json")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--concurrency", "2"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await soon(lambda: len(server.engine.requests) >= 6)
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
        assert process.returncode == 130
        document = json.loads(stdout)
        assert document["complete"] is False
        assert 4 <= document["entries"] < 50
        assert "Traceback" not in stderr.decode()
        await soon(lambda: server.engine.num_running == 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("warm",),
        ("warm", "missing.jsonl", "--url", "http://127.0.0.1:9"),
        ("warm", "rows.jsonl"),
        ("warm", "rows.jsonl", "--url", "ftp://127.0.0.1"),
        ("warm", "rows.jsonl", "--url", "http://127.0.0.1:9", "--concurrency", "0"),
        ("pin", "--url", "http://127.0.0.1:9"),
        ("pin", "1", "--namespace", "abcd", "--url", "http://127.0.0.1:9"),
        ("unpin", "1", "--all", "--url", "http://127.0.0.1:9"),
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Cli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write_rows(tmp_path / "rows.jsonl", chat("x"))
    outcome = cli(*arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "Traceback" not in outcome.stderr


def test_nobody_there_is_exit_code_3(cli: Cli, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", chat("x"))
    assert cli("warm", "rows.jsonl", "--url", "http://127.0.0.1:9").code == 3
