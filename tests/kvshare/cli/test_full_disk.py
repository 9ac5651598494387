"""
A real server whose disk runs full, and has room again.

The files of the index are mapped: a write for which there is no room ends the process by SIGBUS, without a
word. The first test here kills a server that does not look at the room first.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.served import Served, eventually, serving
from tests.small_disk import SmallDisk, small_disk

pytestmark = [
    pytest.mark.slow,  # each imports torch in a process of its own
    pytest.mark.model,
    pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built"),
]
MB = 2**20
FLOOR = 16 * MB
CONFIG = f"store: {{min_free_bytes: {FLOOR}}}\n"
NOT_STORED = {"kvshare": {"mode": "approx", "no_store": True}}


def disk_of(tmp_path: Path, num_bytes: int, *, num_filled: int = 0, options: str = "") -> SmallDisk:
    disk = small_disk(tmp_path / "disk", num_bytes, num_filled=num_filled, options=options)
    if disk is None:
        pytest.skip("this process may not mount a small file system")
    return disk


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(300, 1500), k=300)


def with_another_head(tokens: list[int]) -> list[int]:
    """No equal prefix is left; all the rest is found by its fingerprints."""
    return [*prompt(10**6)[:8], *tokens[8:]]


def decision(answer: dict[str, Any]) -> str:
    found: str = answer["usage"]["kvshare"]["decision"]
    return found


def text(answer: dict[str, Any]) -> str:
    found: str = answer["choices"][0]["text"]
    return found


def is_found_by_fingerprints(server: Served, tokens: list[int]) -> bool:
    return decision(server.complete(with_another_head(tokens), **NOT_STORED)) == "approx"


def is_paused(server: Served) -> bool:
    return server.metric("kvshare_index_paused") == 1


def test_a_disk_that_runs_full_loses_no_request(tmp_path: Path) -> None:
    """
    All are answered as ever; the log says once that the index pauses and once that it goes on, /ready and the
    metrics say it meanwhile, and what was missed is indexed afterwards. Closing on a full disk goes well.
    """
    disk = disk_of(tmp_path, 48 * MB)
    # The metadata are elsewhere: where they fail first, nothing is kept and the index is not written either.
    (tmp_path / ".kvshare").mkdir()
    (tmp_path / ".kvshare" / "index").symlink_to(disk.folder)
    with serving(tmp_path, config=CONFIG, prefix=disk.command) as server:
        filler = disk.filler(server.process.pid)
        before = {seed: text(server.complete(prompt(seed))) for seed in range(4)}
        eventually(lambda: is_found_by_fingerprints(server, prompt(0)))
        assert not is_paused(server)

        filler.fill()  # to the last byte
        missed = range(100, 120)
        before |= {seed: text(server.complete(prompt(seed))) for seed in missed}
        assert {seed: text(server.complete(prompt(seed))) for seed in before} == before
        eventually(lambda: is_paused(server))
        eventually(lambda: server.metric("kvshare_index_waiting_prompts") == len(missed))
        assert decision(server.complete(prompt(100)[:200], **NOT_STORED)) == "exact"
        assert not is_found_by_fingerprints(server, prompt(100))
        assert is_found_by_fingerprints(server, prompt(0))
        status, detail = server.ready()
        assert status == 200
        assert detail.startswith("ok; the index is paused")

        filler.empty()
        eventually(lambda: not is_paused(server))
        eventually(lambda: server.metric("kvshare_index_waiting_prompts") == 0)
        eventually(lambda: is_found_by_fingerprints(server, prompt(100)))
        assert server.ready() == (200, "ok")
        server.complete(prompt(300))
        eventually(lambda: is_found_by_fingerprints(server, prompt(300)))
        assert {seed: text(server.complete(prompt(seed))) for seed in before} == before
        assert len(server.logged("the index is not written any more")) == 1
        assert len(server.logged("the index is written again")) == 1

        filler.fill()
        server.complete(prompt(400))
        assert server.stop() == 0


def test_a_server_that_starts_without_room_gets_its_index_later(tmp_path: Path) -> None:
    """
    It serves by prefixes at once; when there is room, the index is made and gets what it missed. Later the
    whole store runs full, and neither the metadata nor the end of the server mind.
    """
    disk = disk_of(tmp_path, 48 * MB, num_filled=44 * MB)
    with serving(tmp_path, "--store", disk.folder, config=CONFIG, prefix=disk.command) as server:
        assert server.ready()[1].startswith("ok; the index is paused")
        server.complete(prompt(1))
        assert decision(server.complete(prompt(1)[:200], **NOT_STORED)) == "exact"
        assert not is_found_by_fingerprints(server, prompt(1))
        filler = disk.filler(server.process.pid)
        filler.empty()
        eventually(lambda: is_found_by_fingerprints(server, prompt(1)))
        status, detail = server.ready()  # KV on disk has a higher floor of its own
        assert (status, "index" in detail) == (200, False)
        filler.fill()
        for seed in range(100, 110):
            server.complete(prompt(seed))
        refused = {"component": "store", "reason": "refused"}
        eventually(lambda: server.metric("kvshare_fallback_total", **refused) == 10)
        assert len(server.logged("prompts are not stored until")) == 1
        filler.empty()
        server.complete(prompt(200))
        eventually(lambda: len(server.logged("prompts are stored again; 10 were not")) == 1)
        filler.fill()
        assert server.stop() == 0


@pytest.mark.parametrize("temporary", [False, True])
def test_a_disk_too_small_for_an_index_is_served_without(tmp_path: Path, temporary: bool) -> None:
    """On 3 MB an empty index hardly fits; in a temporary folder it is the same."""
    disk = disk_of(tmp_path, 3 * MB)
    config = f"store: {{path: {'null' if temporary else disk.folder}}}\n"
    env = {"TMPDIR": str(disk.folder)}
    with serving(tmp_path, config=config, prefix=disk.command, env=env) as server:
        for seed in range(3):
            server.complete(prompt(seed))
        assert decision(server.complete(prompt(0)[:200], **NOT_STORED)) == "exact"
        assert is_paused(server)
        assert server.stop() == 0


def test_a_floor_above_what_is_free_pauses_the_index(tmp_path: Path) -> None:
    """The same where nothing may be mounted: the floor is higher than any disk."""
    config = f"store: {{min_free_bytes: {2**60}}}\n"
    with serving(tmp_path, config=config) as server:
        status, detail = server.ready()
        assert status == 200
        assert detail.startswith("ok; the index is paused")
        server.complete(prompt(1))
        assert decision(server.complete(prompt(1)[:200], **NOT_STORED)) == "exact"
        assert not is_found_by_fingerprints(server, prompt(1))
        assert is_paused(server)
        assert len(server.logged("the index is not written any more")) == 1
        assert not list((tmp_path / ".kvshare").glob("index/shard"))
        assert server.stop() == 0
