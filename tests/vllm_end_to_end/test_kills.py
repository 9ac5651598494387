"""
A vLLM is killed ten times while it writes KV to its disk: a test of minutes, for `make long`.

The proxy stays. Files are written slowly (`slow_writer.py`), so that a kill comes within one.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import openai
import pytest

from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import verify
from kvshare.vllm_protocol.messages import WORKER_CLASS
from kvshare_lab.demo_model.pairs import Pair
from kvshare_lab.vllm.servers import START_S, Server, VllmOptions, new_token, running, shared_vllm
from tests.conftest import Server as EmbeddedServer
from tests.vllm_end_to_end.fleet import (
    WAIT_S,
    ask,
    log_of,
    log_tail,
    pair,
    proxy_with_keys,
    replica_info,
    wait_connected,
    wait_until,
)

KILLS, DONORS, ASKED = 10, 2, 4
LONGEST_S = 3.0  # between the last answer and the kill; the files of a prompt take longer
ROOT = Path(__file__).parents[2]
SLOW_WRITER = "tests.vllm_end_to_end.slow_writer.SlowWriter"


def slowly_writing(server: Server) -> None:
    """`kvshare vllm` takes no other worker class."""
    command = [*server.command, "--print-command"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    server.command = [SLOW_WRITER if word == WORKER_CLASS else word for word in shlex.split(printed)]
    server.environment = {**server.environment, "PYTHONPATH": str(ROOT)}


@contextmanager
def stack(folder: Path) -> Iterator[tuple[Server, Server]]:
    """One vLLM that writes slowly, and the proxy before it."""
    from kvshare_lab.demo_model.export import export

    token = new_token()
    options = VllmOptions(
        dtype="float32", max_model_len=2048, max_num_batched_tokens=2048, enforce_eager=True
    )
    model = export(folder / "demo")
    replica = shared_vllm(model, folder, options, kv_bytes=1 << 29, token=token, disk=folder / "kv")
    slowly_writing(replica)
    proxy = proxy_with_keys([replica], folder, token)
    with running([replica]), running([proxy]):
        wait_connected(proxy, [replica])
        yield replica, proxy


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=EmbeddedServer.key("ann"), max_retries=0, timeout=WAIT_S
    )


def said_and_held(replica: Server) -> tuple[int, int]:
    """How many segments it says are on disk, and how many it has in all. It says so with a step."""
    with client(replica.url) as direct:
        ask(direct, [{"role": "user", "content": "hi"}])
    info = replica_info(replica)
    return int(info["num_disk_segments"]), int(info["num_segments"])


def start_again(replica: Server, proxy: Server) -> str:
    """After a kill. Returns what the proxy has logged since it found that vLLM serves and shares again."""
    name = replica.url.removeprefix("http://")
    lines = [f"replica {name} serves", f"replica {name}: connected"]  # in any order, with seconds between
    before = len(log_of(proxy))
    replica.stop()
    replica.start()
    replica.wait_ready(START_S)

    def connected() -> bool:
        new = log_of(proxy)[before:]
        return all(line in new for line in lines)

    wait_until(connected, lambda: log_tail(proxy))
    return log_of(proxy)[before:]


def files_of(folder: Path) -> tuple[int, list[Path]]:
    """
    The number of finished files that a killed vLLM has left, and the unfinished ones.

    Raises:  ObjectError for a finished file whose bytes do not match its checks
    """
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # free once its processes have ended
    finished = [verify(Files(), path) for path in folder.rglob("*.kv")]
    return len(finished), list(folder.rglob("*.kv.tmp"))


def wrong_answers(proxy: Server, pairs: list[Pair]) -> tuple[list[str], int]:
    """Answers of near-duplicates that are not the model's, and how many copied a good part of a donor."""
    wrong, num_shared = [], 0
    with client(proxy.url) as ann:
        for forms in pairs:
            answer, num_tokens, num_cached = ask(ann, forms.recipient_messages)
            num_shared += num_cached > 0.3 * num_tokens
            if answer != forms.answer:
                wrong.append(f"{answer!r} in place of {forms.answer!r}")
    return wrong, num_shared


def donate(proxy: Server, pairs: list[Pair]) -> None:
    with client(proxy.url) as ann:
        for forms in pairs:
            ask(ann, forms.donor_messages)


def wait_written(replica: Server, at_least: int) -> None:
    """Until all that it has is said to be on disk, so many segments or more."""

    def is_written() -> bool:
        said, held = said_and_held(replica)
        return said == held >= at_least

    wait_until(is_written, lambda: replica_info(replica))


@pytest.mark.long
def test_ten_kills_while_it_writes(tmp_path: Path) -> None:
    """
    What it said to be on disk is found after each, what was unfinished is deleted, and no answer is wrong, of
    old prompts and of new ones. Prompts that were written before the first kill are shared after each.
    """
    rng, known, num_within = Random(0), list[Pair](), 0
    with stack(tmp_path) as (replica, proxy):
        kept = [pair(999 - place) for place in range(DONORS)]
        donate(proxy, kept)
        wait_written(replica, at_least=len(kept) + 1)
        for number in range(1, KILLS + 1):
            new = [pair(1000 + DONORS * number + place) for place in range(DONORS)]
            donate(proxy, new)
            time.sleep(rng.uniform(0.0, LONGEST_S))
            said, held = said_and_held(replica)
            os.killpg(replica.session_id, signal.SIGKILL)
            found, unfinished = files_of(tmp_path / "kv")
            counts = f"kill {number}: {said} of {held} were said to be on disk, {found} were"
            print(f"{counts}, {len(unfinished)} unfinished", flush=True)  # noqa: T201
            assert found >= said, counts
            num_within += len(unfinished)
            assert f"connected, {found} segments" in start_again(replica, proxy), log_tail(proxy)
            known += new
            wrong, num_shared = wrong_answers(proxy, kept)
            assert (wrong, num_shared) == ([], len(kept)), f"{counts}\n{log_tail(proxy)}"
            wrong, _ = wrong_answers(proxy, [*new, *rng.sample(known, min(ASKED, len(known)))])
            assert wrong == [], f"{counts}\n{log_tail(proxy)}"
            wait_until(lambda: not any(map(Path.exists, unfinished)), lambda: unfinished)  # noqa: B023
        assert num_within >= KILLS // 2, "the kills came when all was written"
