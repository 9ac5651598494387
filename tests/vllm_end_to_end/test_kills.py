"""
A vLLM is killed ten times while it writes KV to its disk: a test of minutes, for `make long`.

The proxy stays. Writing is slowed down, so that every kill comes between two files, or within one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import openai
import pytest

from kvshare.tiers.files import Files
from kvshare.tiers.kv_object import ObjectError, verify
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
WRITE_BYTES_PER_S = 500_000  # a prompt takes some seconds
LONGEST_S = 3.0  # between the last answer and the kill


def slowly_writing(server: Server) -> None:
    """The bound of its writes is a setting of the connector that `kvshare vllm` has no option for."""
    command = [*server.command, "--print-command"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    words = shlex.split(printed)
    place = next(number for number, word in enumerate(words) if '"kv_connector"' in word)
    config = json.loads(words[place])
    config["kv_connector_extra_config"]["kvshare"]["disk_write_bytes_per_s"] = WRITE_BYTES_PER_S
    words[place] = json.dumps(config)
    server.command = words


@contextmanager
def stack(folder: Path) -> Iterator[tuple[Server, Server]]:
    """One vLLM that writes slowly, and the proxy before it."""
    from kvshare.demo.export import export

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


def start_again(replica: Server, proxy: Server) -> None:
    """After a kill. The proxy connects to it again by itself."""
    line = f"replica {replica.url.removeprefix('http://')}: connected"
    before = log_of(proxy).count(line)
    replica.stop()
    replica.start()
    replica.wait_ready(START_S)
    wait_until(lambda: log_of(proxy).count(line) > before, lambda: log_tail(proxy))


def num_whole(folder: Path) -> int:
    """Objects whose bytes match their checks, before anything else looks at them."""
    found = 0
    for path in folder.rglob("*.kv"):
        with suppress(ObjectError):
            verify(Files(), path)
            found += 1
    return found


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


def donate_and_wait(replica: Server, proxy: Server, pairs: list[Pair]) -> None:
    """Store their donors, until all of their segments are said to be on disk."""
    with client(proxy.url) as ann:
        for forms in pairs:
            ask(ann, forms.donor_messages)

    def is_written() -> bool:
        said, held = said_and_held(replica)
        return said == held > len(pairs)

    wait_until(is_written, lambda: replica_info(replica))


@pytest.mark.long
def test_ten_kills_while_it_writes(tmp_path: Path) -> None:
    """
    What it said to be on disk is whole after each, and no answer is wrong, of old prompts and of new ones.
    Prompts that were written before the first kill are shared after each: what is lost is newer.
    """
    rng, known, num_within = Random(0), list[Pair](), 0
    with stack(tmp_path) as (replica, proxy):
        kept = [pair(999 - place) for place in range(DONORS)]
        donate_and_wait(replica, proxy, kept)
        for number in range(1, KILLS + 1):
            new = [pair(1000 + DONORS * number + place) for place in range(DONORS)]
            with client(proxy.url) as ann:
                for forms in new:
                    ask(ann, forms.donor_messages)
            time.sleep(rng.uniform(0.0, LONGEST_S))
            said, held = said_and_held(replica)
            os.killpg(replica.session_id, signal.SIGKILL)
            num_within += said < held
            found = num_whole(tmp_path / "kv")
            assert found >= said, f"kill {number}: {said} segments were said to be on disk, {found} are"
            start_again(replica, proxy)
            known += new
            wrong, num_shared = wrong_answers(proxy, kept)
            assert (wrong, num_shared) == ([], len(kept)), f"kill {number}\n{log_tail(proxy)}"
            wrong, _ = wrong_answers(proxy, [*new, *rng.sample(known, min(ASKED, len(known)))])
            assert wrong == [], f"kill {number}\n{log_tail(proxy)}"
            print(f"kill {number}: {said} of {held} were said to be on disk, {found} were")  # noqa: T201
        assert num_within >= KILLS // 2, "the kills came when all was written"
