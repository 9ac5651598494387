"""Tenants by name, and the KV of each: by a real engine behind the real front."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshare.tenants import NAMESPACES_FILE
from proxy.usage import USAGE_FILE
from tests.proxy.conftest import key_of, key_settings
from tests.proxy.embedded_server import EmbeddedServer, running_embedded

pytestmark = pytest.mark.model

FORM = "Form {0} of the office in street {0}: name {0}{0}, age {0}, town {0}{0}{0}, and nothing else to say. "


SIZE = 330 * 9216  # bytes: more than one prompt, and less than two


def prompt(number: int, times: int = 6) -> str:
    """One that no other number's shares anything with that counts."""
    return FORM.format(f"{number:03d}") * times


class Tenants:
    """A server with the keys of KEYS, whose root is an operator of no tenant of users."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server

    async def send(self, name: str, text: str, **extra: object) -> dict[str, Any]:
        """The usage of one completion; it is stored by then."""
        body = {"model": "kvshare-demo", "prompt": text, "max_tokens": 1, **extra}
        found = await self.ask("/v1/completions", body, name=name)
        await self.server.engine.settle()
        usage: dict[str, Any] = found["usage"]
        return usage

    async def ask(self, path: str, body: object = None, *, name: str = "root") -> dict[str, Any]:
        headers, method = {"Authorization": f"Bearer {key_of(name)}"}, "GET" if body is None else "POST"
        async with self.server.http.request(
            method, self.server.url + path, json=body, headers=headers
        ) as response:
            document: dict[str, Any] = await response.json()
            assert response.status == 200, document
        return document

    async def metrics(self) -> str:
        headers = {"Authorization": f"Bearer {key_of('root')}"}
        async with self.server.http.get(f"{self.server.url}/metrics", headers=headers) as response:
            return await response.text()


KEYS = [entry | ({"tenant": "operators"} if entry["name"] == "root" else {}) for entry in key_settings()]


async def test_an_administrator_names_tenants(tmp_path: Path) -> None:
    """In stats, tree, explain, requests, evictions, metrics; also after a restart, and of divided spaces."""
    store = {"store__path": str(tmp_path), "store__disk_keep_free_bytes": 0}
    async with running_embedded(auth__keys=KEYS, **store) as server:
        of = Tenants(server)
        await of.send("alice", prompt(1))
        await of.send("alice", prompt(2), cache_salt="of a client")
        await of.send("carol", prompt(3))
        await of.send("eve", prompt(4))
        stats = await of.ask("/admin/stats")
        nodes = {row["tenant"]: row["num_nodes"] for row in stats["tenants"]}
        assert nodes == {"acme": 3, "globex": 1}
        assert sum(row["num_bytes"] for row in stats["tenants"]) == stats["totals"]["num_bytes"]
        of_globex = await of.ask("/admin/stats?tenant=globex")
        assert (of_globex["totals"]["num_nodes"], len(of_globex["namespaces"])) == (1, 1)
        tree = await of.ask("/admin/tree?tenant=acme")
        assert {root["tenant"] for root in tree["roots"]} == {"acme"}
        owners = sorted((each["scope"], each["divided"], *each["keys"]) for each in tree["owners"].values())
        assert owners == [
            ("private", False, "carol"),
            ("tenant", False, "alice", "bob"),
            ("tenant", True, "alice", "bob"),
        ]
        await _explains(of)
        await _counts(of, of_globex["totals"]["num_bytes"])
    assert (tmp_path / NAMESPACES_FILE).stat().st_mode & 0o077 == 0
    async with running_embedded(auth__keys=KEYS, **store) as server:
        of = Tenants(server)
        assert {row["tenant"] for row in (await of.ask("/admin/stats"))["tenants"]} == {"acme", "globex"}
        usage = await of.ask("/admin/usage?by=tenant")
        assert {row["tenant"]: row["requests"] for row in usage["rows"]} == {"acme": 3, "globex": 1}
        announced = await of.ask("/admin/evict", {"tenant": "acme"})
        assert (announced["num_nodes"], announced["dry_run"]) == (3, True)
        assert (await of.ask("/admin/evict", {"all": True, "older_than_s": 3600}))["num_nodes"] == 0
        evicted = await of.ask("/admin/evict", {"tenant": "acme", "dry_run": False})
        assert evicted == announced | {"dry_run": False}
        assert {row["tenant"] for row in (await of.ask("/admin/stats"))["tenants"]} == {"globex"}
        assert (await of.send("eve", prompt(4)))["prompt_tokens_details"]["cached_tokens"] > 0


async def _counts(of: Tenants, num_bytes: int) -> None:
    """Requests and metrics have the tenants; `num_bytes`: of globex' KV."""
    listed = await of.ask("/admin/requests?tenant=globex")
    assert [(each["key"], each["tenant"]) for each in listed["requests"]] == [("eve", "globex")]
    text = await of.metrics()
    assert 'kvshare_tenant_requests_total{outcome="served",tenant="acme"} 3.0' in text
    (found,) = re.findall(r'^kvshare_tenant_kv_bytes\{tenant="globex"\} (\S+)$', text, re.MULTILINE)
    assert float(found) == num_bytes


async def _explains(of: Tenants) -> None:
    """What a tenant's keys share is found by its name, a private key's prompts by the name of the key."""
    for number, query, is_found in (
        (1, "", False),
        (1, "&tenant=acme", True),
        (3, "&tenant=acme", False),
        (3, "&key=carol", True),
        (3, "&key=carol&tenant=acme", True),
        (4, "&tenant=acme", False),
    ):
        body = {"model": "kvshare-demo", "prompt": prompt(number) + "and more", "max_tokens": 1}
        explained = await of.ask(f"/admin/explain?api=completions{query}", body)
        assert (explained["exact"] > 0) is is_found, query
    for query in ("tenant=nobody", "key=nobody", "key=carol&tenant=globex"):
        async with of.server.http.post(
            f"{of.server.url}/admin/explain?api=completions&{query}",
            json={"model": "kvshare-demo", "prompt": prompt(1)},
            headers={"Authorization": f"Bearer {key_of('root')}"},
        ) as response:
            assert response.status == 400


async def _cached_after_a_flood(of: Tenants, first: int) -> tuple[int, int]:
    """How many tokens of globex' prompt are cached after eight others of acme, and of acme's last one."""
    await of.send("eve", prompt(0))
    for number in range(first, first + 8):
        await of.send("alice", prompt(number))
    last = await of.send("alice", prompt(first + 7))
    again = await of.send("eve", prompt(0))
    cached, own = (usage["prompt_tokens_details"]["cached_tokens"] for usage in (again, last))
    return cached, own


async def test_a_flood_evicts_its_own_tenants_prompts(tmp_path: Path) -> None:
    """Without a limit it evicts another tenant's; with one that stays, and what the flood sent last, too."""
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": KEYS}))
    store = {"store__kv_bytes": 5 * SIZE, "store__disk_bytes": 0}
    async with running_embedded(auth__keys_file=str(file), **store) as server:
        of = Tenants(server)
        await of.send("eve", prompt(0))
        assert SIZE // 2 < (await of.ask("/admin/stats"))["totals"]["num_bytes"] <= SIZE
        assert (await _cached_after_a_flood(of, 1))[0] == 0
        limit = 3 * SIZE
        tenants = [{"name": "acme", "max_kv_bytes": limit}]
        file.write_text(yaml.safe_dump({"keys": KEYS, "tenants": tenants}))
        await of.ask("/admin/reload", {})
        cached, own = await _cached_after_a_flood(of, 11)
        assert min(cached, own) > 0
        (acme,) = (await of.ask("/admin/stats?tenant=acme"))["tenants"]
        assert (acme["max_bytes"], acme["num_bytes"] > SIZE) == (limit, True)
        assert acme["num_bytes"] <= limit
        assert 'kvshare_evictions_total{reason="quota"}' in await of.metrics()
        evicted = {row["tenant"]: row["evicted"] for row in (await of.ask("/admin/tenants"))["tenants"]}
        assert evicted["acme"] > 0
        assert evicted["globex"] == 0
        assert f'kvshare_tenant_evictions_total{{tenant="acme"}} {evicted["acme"]:.1f}' in await of.metrics()


async def test_usage_is_that_of_the_answers(tmp_path: Path) -> None:
    """Tokens by source, per key, add up to what clients were answered; a refused request is only refused."""
    tenants = [{"name": "globex", "requests_per_minute": 1}]
    async with running_embedded(auth__keys=KEYS, auth__tenants=tenants, store__path=str(tmp_path)) as server:
        of = Tenants(server)
        sent = [await of.send(name, prompt(1)) for name in ("alice", "bob", "eve")]
        body = {"model": "kvshare-demo", "prompt": prompt(1)}
        headers = {"Authorization": f"Bearer {key_of('eve')}"}
        async with server.http.post(f"{server.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 429
        usage = await of.ask("/admin/usage")
        rows = {row["key"]: row for row in usage["rows"]}
        assert rows.keys() == {"alice", "bob", "eve"}
        assert rows["bob"]["exact"] == sent[1]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (rows["eve"]["requests"], rows["eve"]["refused"], rows["eve"]["exact"]) == (1, 1, 0)
        total = usage["total"]
        assert total["prompt_tokens"] == sum(each["prompt_tokens"] for each in sent)
        parts = ("exact", "copied", "repaired", "recomputed")
        assert sum(total[part] for part in parts) == total["prompt_tokens"]
        assert total["completion_tokens"] == 3
        assert rows["bob"]["saved_s"] > rows["alice"]["saved_s"]
        of_globex = await of.ask("/admin/usage?by=tenant&tenant=globex&since=2026-01-01")
        assert [row["tenant"] for row in of_globex["rows"]] == ["globex"]
    assert (tmp_path / USAGE_FILE).stat().st_mode & 0o077 == 0
