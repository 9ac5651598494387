"""The same commands on a running server, and how they end when it does not answer as hoped."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvshare.cli.conftest import ADMIN_KEY, EXPLANATION, MODEL, Cli, Running


def on(server: Running) -> list[object]:
    return ["--url", server.url, "--key", ADMIN_KEY, "--format", "json"]


def test_stats_and_tree_come_from_the_server(cli: Cli, server: Running) -> None:
    """Answers have the same shape as those from a stopped store."""
    assert cli("stats", *on(server)).document["totals"]["num_nodes"] == 4
    (root,) = cli("tree", server.family.root, "--depth", 1, *on(server)).document["roots"]
    assert (root["num_children"], root["children"]) == (1, [])


def test_node_and_diff_come_from_the_server(cli: Cli, server: Running) -> None:
    """Ids travel in the path and in the query."""
    family = server.family
    assert cli("node", family.grand, *on(server)).document["parents"] == [family.child, family.root]
    assert cli("diff", family.root, family.child, *on(server)).document["num_common_prefix"] == 40


def test_evicting_drops_from_the_server(cli: Cli, server: Running) -> None:
    """A dry run leaves the server's tree as it was; --yes empties it."""
    assert cli("evict", "--all", *on(server)).document["dry_run"] is True
    assert len(server.tree.nodes()) == 4
    assert cli("evict", server.family.grand, *on(server)).document["num_nodes"] == 1
    assert cli("evict", "--all", "--yes", *on(server)).document["num_nodes"] == 3
    assert server.tree.nodes() == ()


def test_url_and_key_may_come_from_the_environment(cli: Cli, server: Running) -> None:
    """KVSHARE_URL and KVSHARE_ADMIN_KEY stand in for --url and --key."""
    env = {"KVSHARE_URL": server.url, "KVSHARE_ADMIN_KEY": ADMIN_KEY}
    assert cli("stats", "--format", "json", env=env).document["totals"]["num_nodes"] == 4


def test_the_key_is_not_sent_through_a_proxy(cli: Cli, server: Running) -> None:
    """The named host is asked directly, whatever http_proxy says."""
    env = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    assert cli("stats", *on(server), env=env).code == 0


def test_explain_sends_the_request_and_shows_the_plan(cli: Cli, server: Running) -> None:
    """A prompt becomes one user message for the served model; the answer is shown as it came."""
    outcome = cli("explain", "--prompt", "hello", *on(server))
    assert outcome.document == EXPLANATION
    assert server.explained == [{"messages": [{"role": "user", "content": "hello"}], "model": MODEL}]


def test_explain_reads_a_request_from_stdin(cli: Cli, server: Running) -> None:
    """A whole chat request is passed on, its model included."""
    request = {"model": "mine", "messages": [{"role": "user", "content": "hi"}]}
    outcome = cli("explain", "--file", "-", *on(server), stdin=json.dumps(request))
    assert outcome.code == 0
    assert server.explained == [request]


def test_explain_of_another_api(cli: Cli, server: Running, tmp_path: Path) -> None:
    """The file is a request of the API that --api names; without a server only chats are explained."""
    request = {"model": "mine", "input": "hi"}
    given = ("explain", "--api", "responses", "--file", "-")
    assert cli(*given, *on(server), stdin=json.dumps(request)).code == 0
    assert server.explained == [request]
    assert cli("explain", "--api", "responses", "--prompt", "hi", *on(server)).code == 2
    offline = cli(*given, "--store", tmp_path, stdin=json.dumps(request))
    assert (offline.code, "use --url" in offline.stderr) == (1, True)


def test_explain_on_a_terminal_tells_donors_and_saving(cli: Cli, server: Running) -> None:
    """Decision, spans, donors and the expected saving can be read."""
    outcome = cli("explain", "--prompt", "hello", "--url", server.url, "--key", ADMIN_KEY)
    whom = "planned for the private key chatbot-1 of tenant north-america, mode approx"
    assert f"approx: deviates_too_much\n{whom}\nPut what changes near the end.\n" in outcome.stdout
    assert "rules that acted: clock, nonce\n" in outcome.stdout
    assert outcome.code == 0
    for part in ("approx", "placeholder", "prefix", "1.40 s", "30.0%"):
        assert part in outcome.stdout


def test_a_refused_key_is_exit_code_1(cli: Cli, server: Running) -> None:
    """One line says that the key was refused and how to give one."""
    outcome = cli("stats", "--url", server.url, "--key", "wrong")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "KVSHARE_ADMIN_KEY" in outcome.stderr
    assert "wrong" not in outcome.stderr


def test_the_servers_refusal_is_told(cli: Cli, server: Running) -> None:
    """A question that the server refuses ends with 1 and the server's own message."""
    outcome = cli("node", 12345, *on(server))
    assert outcome.code == 1
    assert "no node 12345" in outcome.stderr


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that is bound but not listened on: connections are refused, and nobody else can take it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("arguments", [("stats",), ("explain", "--prompt", "x")])
def test_an_unreachable_server_is_exit_code_3(cli: Cli, silent_port: int, arguments: tuple[str, ...]) -> None:
    """One clear line with the address, and no traceback."""
    url = f"http://127.0.0.1:{silent_port}"
    outcome = cli(*arguments, "--url", url)
    assert (outcome.code, outcome.stdout) == (3, "")
    assert url in outcome.stderr
    assert outcome.stderr.count("\n") == 1
