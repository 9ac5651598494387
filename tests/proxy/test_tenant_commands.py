"""`kvshare usage`, `tenants`, `config` and `explain` on a running server, by the real command line."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.settings import SettingsSource
from tests.proxy.conftest import Server, chat, key_of, key_settings, running_server


@pytest.fixture
async def used(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with a tenant that has used its one request a minute, and another."""
    (tmp_path / "keys.yaml").write_text(
        yaml.safe_dump({"keys": key_settings(), "tenants": [{"name": "globex", "requests_per_minute": 1}]})
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump({"auth": {"keys_file": str(tmp_path / "keys.yaml")}, "store": {"path": None}})
    )
    async with running_server(source=SettingsSource(file)) as server:
        for name in ("alice", "carol", "eve", "eve"):
            headers = {"Authorization": f"Bearer {key_of(name)}"}
            await server.post("/v1/chat/completions", chat("hello, what is there?"), **headers)
        yield server


async def command(server: Server, *arguments: str) -> str:
    """What it prints."""

    def run() -> str:
        options = ["--url", server.url, "--key", key_of("root")]
        result = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return await asyncio.to_thread(run)


async def test_usage_is_a_table_for_people_and_csv_for_sheets(used: Server) -> None:
    """With the total below; a refused request is not among the requests."""
    lines = [line.split() for line in (await command(used, "usage", "--by", "tenant")).splitlines()]
    assert lines[0][:3] == ["tenant", "requests", "refused"]
    numbers = {line[0]: line[1:3] for line in lines if len(line) > 6}
    assert {name: numbers[name] for name in ("acme", "globex", "all")} == {
        "acme": ["2", "0"],
        "globex": ["1", "1"],
        "all": ["3", "1"],
    }
    rows = list(csv.DictReader(io.StringIO(await command(used, "usage", "--csv"))))
    assert {row["key"]: row["requests"] for row in rows} == {"alice": "1", "carol": "1", "eve": "1"}
    assert "no requests" in await command(used, "usage", "--since", "2999-01-01")


async def test_tenants_are_listed_with_what_they_use_of_their_limits(used: Server) -> None:
    lines = (await command(used, "tenants")).splitlines()
    (globex,) = (line.split() for line in lines if line.startswith("globex"))
    assert globex == ["globex", "1", "0", "0/1", "0", "B", "0", "approx", "1"]
    assert all(len(line) <= 80 for line in lines)


async def test_a_setting_is_changed_shown_and_given_back(used: Server) -> None:
    """off is a mode, though YAML reads it as false."""
    assert (
        await command(used, "config", "set", "sharing.max_mode", "off")
        == "sharing.max_mode is off, was approx\n"
    )
    shown = (await command(used, "config", "show")).splitlines()
    assert ["sharing.max_mode", '"off"', "set", "on", "the", "running", "server"] in [
        line.split() for line in shown
    ]
    assert "is approx, was off" in await command(used, "config", "set", "sharing.max_mode", "null")
    assert await command(used, "config", "reload") == "nothing changed\n"


async def test_a_reload_prints_what_changed_of_each_entry(used: Server, tmp_path: Path) -> None:
    limits = {"name": "globex", "max_mode": "exact"}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": key_settings(), "tenants": [limits]}))
    assert (await command(used, "config", "reload")).splitlines() == [
        "tenant globex: requests_per_minute is null, was 1",
        "tenant globex: max_mode is exact, was approx",
    ]


async def test_explain_is_about_the_tenant_that_is_named(used: Server) -> None:
    """The fake engine's answer does not matter: the request reaches the space of that tenant or key."""

    async def namespace(*options: str) -> Any:
        seen: list[Any] = []
        explain = used.engine.explain

        async def noted(request: Any) -> dict[str, Any]:
            seen.append(request.namespace)
            return await explain(request)

        used.engine.explain = noted  # type: ignore[method-assign]  # on the way to the real one
        await command(used, "explain", "--prompt", "hello", "--format", "json", *options)
        used.engine.explain = explain  # type: ignore[method-assign]
        return seen[0]

    assert (await namespace()).tenant == "acme"
    assert (await namespace("--tenant", "globex")).tenant == "globex"
    assert (await namespace("--of-key", "carol")).scope == "private"


async def test_the_latest_requests_are_listed_and_one_is_shown(used: Server) -> None:
    """Newest first, in 80 columns; one by its id or the first digits of it, with what was shared and why."""
    document = json.loads(await command(used, "requests", "--json"))
    assert document == json.loads(await command(used, "requests", "--format", "json"))
    listed = document["requests"]
    assert [(row["key"], row["status"]) for row in listed] == [
        ("eve", 200),
        ("carol", 200),
        ("alice", 200),
    ]
    lines = (await command(used, "requests")).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[-3:]] == [row["id"][:8] for row in listed]
    assert "full: no_candidates" in lines[-1]
    of_globex = await command(used, "requests", "--tenant", "globex", "--limit", "1")
    assert listed[0]["id"][:8] in of_globex
    assert listed[1]["id"][:8] not in of_globex
    shown = await command(used, "requests", listed[2]["id"][:8])
    for part in (listed[2]["id"], "alice, tenant acme", "No stored prompt of this namespace is similar"):
        assert part in shown


async def test_an_id_that_is_not_known_is_an_error(used: Server) -> None:
    """The first digits of several ids are not enough; of none, the server's answer says what an id is."""

    def outcome(given: str) -> tuple[int, str]:
        options = ["--url", used.url, "--key", key_of("root")]
        result = CliRunner().invoke(app, ["requests", given, *options])
        return result.exit_code, f"{result.output}{result.exception}"

    code, text = await asyncio.to_thread(outcome, "")
    assert (code, "3 requests have an id that begins with" in text) == (2, True)
    code, text = await asyncio.to_thread(outcome, "no-such-id")
    assert (code, "No request with this id is known" in text) == (1, True)


async def test_explain_names_whom_it_plans_for(used: Server) -> None:
    """The operator's own tenant, unless another one or a private key is named."""
    for options, whom in (
        ((), {"tenant": "acme", "key": None}),
        (("--tenant", "globex"), {"tenant": "globex", "key": None}),
        (("--of-key", "carol"), {"tenant": "acme", "key": "carol"}),
    ):
        shown = await command(used, "explain", "--prompt", "hello", "--format", "json", *options)
        assert json.loads(shown)["planned_for"] == whom
