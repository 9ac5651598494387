"""What `kvshare doctor` finds, check by check, on machines and configs that are not fine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from yarl import URL

from kvshare.cli import checks, doctor, store_checks
from kvshare.cli.check import CheckState
from kvshare.settings import Settings, load_settings
from kvshare_lab.bench.random_configurations import LLAMA3_ROPE, TINY
from tests.kvshare.cli.family import write_store
from tests.proxy.conftest import running_server

_TINY: dict[str, Any] = {**TINY, "max_position_embeddings": 512}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
SQLITE = [
    ((3, 7, 0), True),
    ((3, 40, 1), True),
    ((3, 44, 5), True),
    ((3, 44, 6), False),
    ((3, 50, 6), True),
    ((3, 50, 7), False),
    ((3, 51, 2), True),
    ((3, 51, 3), False),
    ((3, 53, 0), False),
]


def settings(tmp_path: Path, **overrides: Any) -> Settings:
    given = {"store.path": str(tmp_path / "store"), "server.port": 0, **overrides}
    return load_settings(None, given)


@pytest.mark.parametrize(("version", "affected"), SQLITE)
def test_sqlite_versions_with_the_wal_reset_bug(version: tuple[int, int, int], affected: bool) -> None:
    """The bug came with 3.7.0 and went with 3.51.3, 3.50.7 and 3.44.6. A store's one writer is safe."""
    check = checks.check_sqlite(version)
    assert check.state is CheckState.OK
    assert ("WAL-reset bug" in check.detail) is affected


def test_a_taken_port_fails(tmp_path: Path) -> None:
    """A port that somebody listens on is told with what to do; a free one is fine."""
    (free,) = checks.check_ports(settings(tmp_path))
    assert free.state is CheckState.OK
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(0)  # it never answers
        port = taken.getsockname()[1]
        for setting in ("server.port", "server.admin_port"):
            found = checks.check_ports(settings(tmp_path, **{setting: port}))
            assert found[-1].state is CheckState.FAIL
            assert setting in found[-1].remedy


async def test_the_port_of_the_server_that_is_asked_is_fine(tmp_path: Path) -> None:
    """Found taken by the server at --url; without one it may be another server, which is a warning."""
    async with running_server() as server:
        port, admin = URL(server.url).port, {"server.admin_port": 0}
        chosen = settings(tmp_path, **{"server.port": port}, **admin)
        for url, state in [
            (server.url, CheckState.OK),
            (f"http://localhost:{port}/", CheckState.OK),
            (None, CheckState.WARN),
            ("http://127.0.0.1:9", CheckState.WARN),
        ]:
            found = await asyncio.to_thread(checks.check_ports, chosen, url)
            assert [check.state for check in found] == [state, CheckState.OK]
            assert f"127.0.0.1:{port}" in found[0].detail


@pytest.mark.parametrize(
    ("origins", "with_keys", "state"),
    [
        ([], False, CheckState.OK),
        (["https://chat.example"], False, CheckState.OK),
        (["*"], True, CheckState.OK),
        (["*"], False, CheckState.WARN),
    ],
)
def test_every_page_may_call_only_with_a_key(
    tmp_path: Path, origins: list[str], with_keys: bool, state: CheckState
) -> None:
    """Any origin and no key is a server for every page in a browser near it; listed origins are named."""
    keys = [{"name": "a", "sha256": "0" * 64, "tenant": "t"}] if with_keys else []
    check = checks.check_pages(settings(tmp_path, **{"server.cors_origins": origins, "auth.keys": keys}))
    assert check.state is state
    assert origins != ["https://chat.example"] or origins[0] in check.detail


def test_a_store_is_created_read_or_moved_aside(tmp_path: Path) -> None:
    """One that is not there yet is fine, one that is there is counted, a damaged one begins anew."""
    chosen = settings(tmp_path)
    assert store_checks.check_store(chosen).state is CheckState.OK
    assert not (tmp_path / "store").exists()
    write_store(tmp_path / "store")
    assert "4 prompts" in store_checks.check_store(chosen).detail
    assert "MB are free" in store_checks.check_store(chosen).detail
    (tmp_path / "store" / "tree.sqlite3").write_bytes(b"not a database" * 100)
    check = store_checks.check_store(chosen)
    assert (check.state, "moved aside" in check.remedy) == (CheckState.WARN, True)


@pytest.mark.parametrize("change", [{"model.dtype": "bfloat16"}, {"engine.kind": "vllm"}])
def test_a_store_for_something_else_is_moved_aside(tmp_path: Path, change: dict[str, str]) -> None:
    """As far as it shows without the weights."""
    write_store(tmp_path / "store")
    check = store_checks.check_store(settings(tmp_path, **change))
    assert (check.state, "moved aside" in check.remedy) == (CheckState.WARN, True)


def test_a_store_that_cannot_be_written_is_in_memory(tmp_path: Path) -> None:
    """Where no folder can be made the server goes on; with null that is what was asked for."""
    (tmp_path / "store").write_text("a file")
    check = store_checks.check_store(settings(tmp_path))
    assert (check.state, "in memory" in check.remedy) == (CheckState.WARN, True)
    check = store_checks.check_store(settings(tmp_path, **{"store.path": None}))
    assert (check.state, "in memory" in check.detail) == (CheckState.OK, True)


def test_the_edge_index_can_be_created(tmp_path: Path) -> None:
    """Qdrant Edge makes a shard in a temporary folder and leaves nothing in the store."""
    assert store_checks.check_index(settings(tmp_path)).state is CheckState.OK
    assert not (tmp_path / "store").exists()


def test_too_little_room_for_the_index_is_a_warning(tmp_path: Path) -> None:
    """The server still serves, by prefixes; nothing is tried on a disk that is full."""
    check = store_checks.check_index(settings(tmp_path, **{"store.min_free_bytes": 2**60}))
    assert check.state is CheckState.WARN
    assert "are free at" in check.detail


def test_a_qdrant_server_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    """Without the index the server still serves, so this is no failure; without an address it is."""
    away = {"index.backend": "server", "index.url": "http://127.0.0.1:1"}
    assert store_checks.check_index(settings(tmp_path, **away)).state is CheckState.WARN
    assert (
        store_checks.check_index(settings(tmp_path, **{"index.backend": "server"})).state is CheckState.FAIL
    )


def test_the_embedder_is_looked_for(tmp_path: Path) -> None:
    """Bundled weights are found, a folder without weights fails, and a name is downloaded later."""
    assert store_checks.check_embedder(settings(tmp_path)).state is CheckState.OK
    empty = settings(tmp_path, **{"index.embedder": str(tmp_path)})
    assert store_checks.check_embedder(empty).state is CheckState.FAIL
    named = settings(tmp_path, **{"index.embedder": "someone/some-embedder"})
    assert store_checks.check_embedder(named).state is CheckState.WARN


def test_a_missing_model_fails(tmp_path: Path) -> None:
    """A model that is not there fails in every check that needs it, each in one line."""
    chosen = settings(tmp_path, **{"model.path": str(tmp_path / "nowhere")})
    looks = (checks.check_model, checks.check_tokenizer, checks.check_geometry)
    for check in [look(chosen) for look in looks]:
        assert check.state is CheckState.FAIL
        assert "\n" not in check.detail
        assert check.remedy


def test_the_geometry_is_proved_without_weights(tmp_path: Path) -> None:
    """A folder with nothing but a configuration is enough to know that keys can be moved."""
    LlamaConfig(**_TINY, rope_parameters=dict(LLAMA3_ROPE)).save_pretrained(tmp_path)
    chosen = settings(tmp_path, **{"model.path": str(tmp_path)})
    assert checks.check_model(chosen).state is CheckState.OK
    assert checks.check_geometry(chosen).state is CheckState.OK


def test_a_geometry_that_is_not_handled_is_a_warning(tmp_path: Path) -> None:
    """Where keys cannot be moved the server still shares prefixes; doctor says why."""
    LlamaConfig(**_TINY, rope_parameters=_DYNAMIC).save_pretrained(tmp_path)
    check = checks.check_geometry(settings(tmp_path, **{"model.path": str(tmp_path)}))
    assert check.state is CheckState.WARN
    assert "dynamic" in check.detail


def test_doctor_asks_everything_once(tmp_path: Path) -> None:
    """Each question has one answer, in the order in which a server would stumble."""
    config = tmp_path / "kvshare.yaml"
    config.write_text(f"store: {{path: {tmp_path / 'store'}}}\nmodel: {{path: {tmp_path}}}\n")
    names = [check.name for check in doctor.run_checks(config)]
    assert names == [
        "python", "sqlite", "config", "torch", "model", "tokenizer", "geometry",
        "store", "disk", "shared", "index", "embedder", "port", "pages",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "url", "state"),
    [
        ("embedded", None, CheckState.OK),
        ("embedded", "redis://localhost/0", CheckState.OK),
        ("vllm", None, CheckState.OK),
        ("vllm", "redis://localhost/0", CheckState.FAIL),
    ],
)
def test_a_shared_store_belongs_to_each_vllm(
    tmp_path: Path, engine: str, url: str | None, state: CheckState
) -> None:
    """The proxy reads no KV, so its own setting would do nothing."""
    chosen = settings(tmp_path, **{"engine.kind": engine, "shared_tier.url": url})
    check = store_checks.check_shared(chosen)
    assert check.state is state
    assert ("kvshare vllm MODEL --shared-tier URL" in check.remedy) is (state is CheckState.FAIL)
