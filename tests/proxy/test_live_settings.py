"""Settings and keys change on a running server; what is wrong changes nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshare.errors import ConfigError, ErrorCode
from kvshare.settings import SettingsSource
from proxy.app import build_app
from proxy.context import SERVER
from proxy.live_settings import CHANGEABLE
from tests.proxy.conftest import Server, chat, key_of, running_server, settings_with
from tests.proxy.fake_engine import FakeEngine


def entry(name: str, tenant: str = "acme", role: str = "infer", key: str = "") -> dict[str, str]:
    digest = hashlib.sha256((key or key_of(name)).encode()).hexdigest()
    return {"name": name, "tenant": tenant, "role": role, "sha256": digest}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


class Files:
    """A file of settings and one of keys, which a running server reads."""

    def __init__(self, folder: Path) -> None:
        self.settings, self.keys = folder / "config.yaml", folder / "keys.yaml"
        self.write()
        self.write_keys(entry("root", role="admin"), entry("alice"))

    def write(self, **sections: Any) -> None:
        auth = {"keys_file": str(self.keys)}
        self.settings.write_text(yaml.safe_dump({"auth": auth, **sections}), encoding="utf-8")

    def write_keys(self, *keys: dict[str, str], tenants: tuple[dict[str, Any], ...] = ()) -> None:
        text = yaml.safe_dump({"keys": list(keys), "tenants": list(tenants)})
        self.keys.write_text(text, encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def running(files: Files) -> AsyncIterator[Server]:
    async with running_server(source=SettingsSource(files.settings, {"store.path": None})) as server:
        yield server


async def status_of(server: Server, name: str) -> int:
    return (await server.post("/v1/chat/completions", chat(), **bearer(name))).status


async def reload(server: Server) -> dict[str, Any]:
    response = await server.post("/admin/reload", {}, **bearer("root"))
    document: dict[str, Any] = await response.json()
    assert response.status == 200, document
    return document


async def mode_of(server: Server, **wanted: object) -> str:
    """Of a request that asks for this."""
    await server.post("/v1/chat/completions", chat(kvshare=wanted or None), **bearer("alice"))
    return server.engine.requests[-1].mode


async def test_keys_change_without_a_restart(files: Files) -> None:
    """A new key is taken, an old one is not, at once; the answer says which, and shows no hash."""
    async with running(files) as server:
        assert [await status_of(server, name) for name in ("alice", "bob")] == [200, 401]
        changed = entry("root", tenant="operators", role="admin")
        files.write_keys(changed, entry("bob"), tenants=({"name": "acme", "requests_per_minute": 1},))
        document = await reload(server)
        assert document["keys"] == {
            "added": ["bob"],
            "removed": ["alice"],
            "changed": {"root": {"tenant": {"from": "acme", "to": "operators"}}},
        }
        assert document["tenants"] == {"added": ["acme"], "removed": [], "changed": {}}
        assert changed["sha256"] not in str(document)
        assert [await status_of(server, name) for name in ("alice", "bob", "bob")] == [401, 200, 429]
        nothing = await reload(server)
        assert nothing == {
            "settings": {},
            **{key: {"added": [], "removed": [], "changed": {}} for key in ("keys", "tenants", "rules")},
            "needs_restart": {},
        }


async def test_the_answer_says_what_of_an_entry_changed(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Each limit before and now; of a key's hash, and of an address with a password, only that it is new."""
    rule = {"name": "nonce", "match": "cch=[0-9a-f]+", "action": "pin", "value": "cch=0"}
    keys, address = (entry("root", role="admin"), entry("alice")), "http://u:{}@qdrant:6333"
    files.write_keys(*keys, tenants=({"name": "acme"},))
    files.write(rules=[rule], index={"url": address.format("SECRET")})
    async with running(files) as server:
        limits = {"name": "acme", "max_mode": "exact", "max_kv_bytes": 5}
        files.write_keys(keys[0], entry("alice", key="another"), tenants=(limits,))
        files.write(rules=[{**rule, "value": ""}], index={"url": address.format("OTHER")})
        document = await reload(server)
    hidden = {"from": "hidden", "to": "hidden"}
    assert document["tenants"]["changed"] == {
        "acme": {
            "max_mode": {"from": "approx", "to": "exact"},
            "max_kv_bytes": {"from": None, "to": 5},
        }
    }
    assert document["keys"]["changed"] == {"alice": {"sha256": hidden}}
    assert document["rules"]["changed"] == {"nonce": {"value": {"from": "cch=0", "to": ""}}}
    assert document["needs_restart"] == {"index.url": hidden}
    assert "tenants acme: max_kv_bytes is 5, was null, max_mode is exact, was approx" in caplog.text
    assert "keys alice: sha256 is another one" in caplog.text
    assert not {"SECRET", "OTHER", keys[1]["sha256"]} & set(re.findall(r"\w+", f"{document}{caplog.text}"))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("keys: [{name: alice, sha256: sk-SECRET, tenant: t", "cannot be read as YAML"),
        ("keys: [{name: alice, sha256: sk-SECRET, tenant: t}]", "keys.0.sha256: expected 64 hex digits"),
        ("", "expected at least one key"),  # cut off while it was written
        (None, "no such file"),
        ("keys: []\ntenants: [{name: a, max_in_flight: -1}]", "tenants.0.max_in_flight"),
    ],
)
async def test_a_wrong_file_changes_nothing(files: Files, keys: str | None, problem: str) -> None:
    """The old keys stay in force, the answer has the place, and no key is in it."""
    async with running(files) as server:
        files.write(sharing={"mode": "exact"})
        if keys is None:
            files.keys.unlink()
        else:
            files.keys.write_text(keys)
        response = await server.post("/admin/reload", {}, **bearer("root"))
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, ErrorCode.INVALID_SETTINGS)
        assert problem in error["message"]
        assert "SECRET" not in str(error)
        assert [await status_of(server, name) for name in ("alice", "root", "bob")] == [200, 200, 401]
        assert await mode_of(server) == "approx"


async def test_settings_of_the_file_change_or_wait_for_a_restart(files: Files) -> None:
    """What cannot change now is named, until the file says again what is in force."""
    async with running(files) as server:
        files.write(sharing={"mode": "exact", "min_run": 99}, engine={"max_waiting": 3})
        document = await reload(server)
        assert document["settings"] == {
            "sharing.mode": {"from": "approx", "to": "exact"},
            "engine.max_waiting": {"from": 64, "to": 3},
        }
        assert document["needs_restart"] == {"sharing.min_run": {"from": 16, "to": 99}}
        assert await mode_of(server) == "exact"
        files.write(sharing={"mode": "exact"})
        assert (await reload(server))["needs_restart"] == {}


async def test_the_kill_switch_ends_sharing_at_once(files: Files) -> None:
    """Whatever a request asks for, it gets no more than sharing.max_mode; null is as the files say."""
    async with running(files) as server:
        for value, expected in (("exact", "exact"), ("off", "off"), (None, "approx")):
            body = {"sharing.max_mode": value}
            assert (await server.post("/admin/settings", body, **bearer("root"))).status == 200
            assert await mode_of(server, mode="approx") == expected
        assert await mode_of(server, mode="off") == "off"


async def test_the_kill_switch_works_while_a_file_is_wrong(files: Files) -> None:
    """It reads none, so that it also puts nothing else in force."""
    async with running(files) as server:
        files.settings.write_text("sharing: [")
        files.keys.write_text("keys: [{sha256: sk-SECRET")
        body = {"sharing.max_mode": "off"}
        assert (await server.post("/admin/settings", body, **bearer("root"))).status == 200
        assert await mode_of(server) == "off"
        error = await (await server.post("/admin/reload", {}, **bearer("root"))).json()
        assert "in line 1" in error["error"]["message"]
        assert await mode_of(server) == "off"


async def test_a_switch_survives_a_reload_and_is_shown(files: Files) -> None:
    """Each setting has its origin."""
    async with running(files) as server:
        await server.post("/admin/settings", {"sharing.max_mode": "exact"}, **bearer("root"))
        await reload(server)
        assert await mode_of(server) == "exact"
        settings = (await (await server.get("/admin/settings", **bearer("root"))).json())["settings"]
        shown = {
            path: settings[path]["origin"] for path in ("sharing.max_mode", "auth.keys_file", "server.port")
        }
        assert list(shown.values()) == ["set on the running server", "file", "default"]
        assert settings["sharing.max_mode"]["value"] == "exact"
        assert {path for path, row in settings.items() if row["changeable"]} == set(CHANGEABLE)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sharing.max_mode": "most"}, "sharing.max_mode"),
        ({"sharing.mod": "off"}, "sharing.mod"),
        ({"server.port": 1}, "server.port"),
        ({"auth.keys": []}, "auth.keys"),
        ({"sharing.mode": "exact", "engine.max_waiting": -1}, "engine.max_waiting"),
    ],
)
async def test_a_wrong_value_changes_nothing(files: Files, body: dict[str, Any], param: str) -> None:
    """Not even what stands next to it; keys change by their file only."""
    async with running(files) as server:
        response = await server.post("/admin/settings", body, **bearer("root"))
        error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (400, param, ErrorCode.INVALID_SETTINGS)
        assert await mode_of(server) == "approx"


async def test_only_administrators_change_settings(files: Files) -> None:
    async with running(files) as server:
        for path in ("/admin/settings", "/admin/reload"):
            assert (await server.post(path, {}, **bearer("alice"))).status == 403
        assert (await server.get("/admin/settings", **bearer("alice"))).status == 403


async def test_a_tenant_gets_no_more_than_its_mode(files: Files) -> None:
    """Approximate reuse is switched off for one of them."""
    files.write_keys(
        entry("alice"), entry("eve", tenant="globex"), tenants=({"name": "acme", "max_mode": "exact"},)
    )
    async with running(files) as server:
        for name, expected in (("alice", "exact"), ("eve", "approx")):
            await server.post("/v1/chat/completions", chat(), **bearer(name))
            assert server.engine.requests[-1].mode == expected


def test_a_file_without_keys_is_refused_at_the_start(files: Files) -> None:
    """The server would be open to all."""
    files.write_keys()
    source = SettingsSource(files.settings)
    with pytest.raises(ConfigError, match="expected at least one key"):
        build_app(source.load(), FakeEngine(), source)


async def test_the_first_key_closes_a_server_that_was_open(tmp_path: Path) -> None:
    """Also in what it says of itself."""
    file = tmp_path / "config.yaml"
    file.write_text("store: {path: null}")
    async with running_server(source=SettingsSource(file)) as server:
        assert (await server.post("/v1/chat/completions", chat())).status == 200
        before = await (await server.get("/openapi.json")).json()
        file.write_text(
            yaml.safe_dump({"store": {"path": None}, "auth": {"keys": [entry("root", role="admin")]}})
        )
        assert (await server.post("/admin/reload", {})).status == 200
        assert (await server.post("/v1/chat/completions", chat())).status == 401
        after = await (await server.get("/openapi.json")).json()
        assert ["securitySchemes" in each["components"] for each in (before, after)] == [False, True]


def test_what_is_read_per_request_is_that_in_force() -> None:
    """The context hands out the live settings, not those of the start."""
    server = build_app(settings_with(), FakeEngine())[SERVER]
    assert server.settings is server.live.settings
