"""What is not well stands in one list: /status, /ready, /admin/status and the metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fake_vllm import Behaviour as VllmBehaviour
from tests.fake_vllm import running_vllm
from tests.proxy.conftest import running_server
from tests.proxy.embedded_server import running_embedded
from tests.proxy.fake_engine import Behaviour
from tests.proxy.relay.relay_server import running_relay
from tests.proxy.test_live_settings import Files, bearer, running


async def parts_of(server: Any, path: str = "/status", **headers: str) -> dict[str, dict[str, Any]]:
    async with server.http.get(server.url + path, headers=headers) as response:
        assert response.status == 200
        document = await response.json()
    return {part["part"]: part for part in document["parts"]}


async def in_state(server: Any, part: str, state: str) -> None:
    """Wait until it is."""
    async with asyncio.timeout(60):
        while (await parts_of(server))[part]["state"] != state:  # noqa: ASYNC110  it does not say when
            await asyncio.sleep(0.05)


async def text_of(server: Any, path: str) -> str:
    async with server.http.get(server.url + path) as response:
        return str(await response.text())


async def test_all_is_well_on_a_server_that_just_started() -> None:
    """Each part has a word, a state, and since when; there is nothing to do."""
    async with running_embedded() as server:
        found = await parts_of(server)
        metrics = await text_of(server, "/metrics")
    assert {"sharing", "index", "fingerprint", "indexing", "store", "costs", "usage", "settings"} <= set(
        found
    )
    assert "disk" not in found  # store.path is null
    del found["model"]  # the demo model has no calibration of its own
    assert {part["state"] for part in found.values()} == {"ok"}
    assert all(part["since"] > 1e9 and "remedy" not in part for part in found.values())
    assert 'kvshare_part_state{part="store",state="ok"} 1.0' in metrics
    assert 'kvshare_part_state{part="store",state="off"} 0.0' in metrics


async def test_a_store_in_memory_is_shown_everywhere_until_it_is_written(tmp_path: Path) -> None:
    """With what to do; details are for administrators. It gets well without a restart."""
    (tmp_path / "file").write_text("no folder")
    async with running_embedded(store__path=str(tmp_path / "file" / "store")) as server:
        found = await parts_of(server)
        assert (found["store"]["state"], "detail" in found["store"]) == ("reduced", False)
        assert "permissions at store.path" in found["store"]["remedy"]
        assert (await parts_of(server, "/admin/status"))["store"]["detail"].startswith(
            "metadata of prompts are"
        )
        assert "metadata of prompts are in memory" in await text_of(server, "/ready")
        assert 'kvshare_part_state{part="store",state="reduced"} 1.0' in await text_of(server, "/metrics")
        (tmp_path / "file").unlink()
        await in_state(server, "store", "ok")


async def test_the_kill_switch_and_wrong_settings_are_listed(tmp_path: Path) -> None:
    """As they are why less is shared than expected; a mended file ends it."""
    files = Files(tmp_path)
    async with running(files) as server:
        root = bearer("root")
        assert (await server.post("/admin/settings", {"sharing.max_mode": "off"}, **root)).status == 200
        files.settings.write_text("nonsense: 1", encoding="utf-8")
        assert (await server.post("/admin/reload", {}, **root)).status == 400
        found = await parts_of(server)
        assert (found["sharing"]["state"], found["settings"]["state"]) == ("off", "reduced")
        assert "nothing is shared; the settings are as before" in await text_of(server, "/ready")
        assert "nonsense" not in await text_of(server, "/ready")
        files.write()
        assert (await server.post("/admin/reload", {}, **root)).status == 200
        assert (await parts_of(server))["settings"]["state"] == "ok"


async def test_the_disk_of_a_vllm_is_listed_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As its connector reports it, with one line in the log each when it begins and when it is over."""
    async with (
        running_vllm(VllmBehaviour(max_disk_bytes=10**8)) as vllm,
        running_relay(tmp_path, vllm) as relay,
    ):
        assert (await parts_of(relay))["disk"]["state"] == "ok"
        caplog.clear()
        vllm.report_disk("No space left on device")
        await in_state(relay, "disk", "off")
        found = (await parts_of(relay, "/admin/status"))["disk"]
        assert found["name"] == relay.engine.fleet.replicas[0].name
        assert found["detail"].endswith("lost with that vLLM: No space left on device")
        assert "--disk" in found["remedy"]
        assert "its KV is not written to disk" in await text_of(relay, "/ready")
        assert 'kvshare_part_state{part="disk",state="off"} 1.0' in await text_of(relay, "/metrics")
        await vllm.restart()  # /info has it
        await in_state(relay, "replica", "ok")
        assert (await parts_of(relay))["disk"]["state"] == "off"
        vllm.report_disk("")
        await in_state(relay, "disk", "ok")
        said = [record.getMessage() for record in caplog.records if record.name == "kvshare.parts"]
    assert [line.partition(" ")[0] for line in said] == ["disk", "disk"]
    assert said[1].endswith("it is well again")


async def test_it_is_answered_before_the_engine_is_up() -> None:
    """A probe must not fail for it."""
    async with running_server(Behaviour(start_s=60.0), wait=False) as server:
        assert await parts_of(server) == {}
