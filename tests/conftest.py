"""Shared by all tests: no hub is ever reached; a real server as its users start it."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile(  # a busy machine is not a failure
    "kvshare", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvshare")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell script's background jobs ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

KEYS = {
    "ann": ("north", "tenant", "infer"),
    "bob": ("north", "tenant", "infer"),
    "cid": ("south", "tenant", "infer"),
    "dot": ("north", "private", "infer"),
    "eve": ("north", "private", "infer"),
    "root": ("operators", "tenant", "admin"),
}


@dataclass(frozen=True)
class Server:
    """A running `kvshare serve`; `key(name)` is the API key of one of `KEYS`."""

    url: str
    process: subprocess.Popen[str]

    @staticmethod
    def key(name: str) -> str:
        return f"kvs-{name}"

    def settle(self) -> None:
        """
        Wait until all prompts that were answered are stored and in the index. A request waits for those
        before it, but on a busy machine not long enough.
        """
        deadline = time.monotonic() + 120
        while self._unsettled():
            assert time.monotonic() < deadline, self._unsettled()
            time.sleep(0.02)

    def _unsettled(self) -> list[str]:
        request = urllib.request.Request(
            f"{self.url}/admin/requests?limit=50", headers={"Authorization": f"Bearer {self.key('root')}"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return unsettled(json.load(reply)["requests"])


def unsettled(requests: Iterable[dict[str, Any]]) -> list[str]:
    """The ids of those of /admin/requests whose prompts are not stored yet, or not in the index."""
    answered = (row for row in requests if row["status"] == 200)
    return [row["id"] for row in answered if not all(entry["settled"] for entry in row.get("stored", ()))]


def _keys() -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "sha256": hashlib.sha256(Server.key(name).encode()).hexdigest(),
            "tenant": tenant,
            "scope": scope,
            "role": role,
        }
        for name, (tenant, scope, role) in KEYS.items()
    ]


HOWEVER_BUSY = {
    "KVSHARE_COST__MIN_SAVED_S": "-3600",
    "KVSHARE_COST__MIN_SAVED_FRACTION": "0",
    "KVSHARE_COST__MEASURE_AT_START": "false",
    "KVSHARE_COST__LEARN": "false",
    "KVSHARE_INDEX__SEARCH_TIMEOUT_S": "60",
    "KVSHARE_INDEX__EMBED_TIMEOUT_S": "60",
}


@pytest.fixture(scope="session", autouse=True)
def compilers_may_start_late() -> Iterator[None]:
    """Those of grammars, whose first process takes its time on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvshare.grammar_pool.pool.ANSWER_S", 120.0)
        yield


@pytest.fixture
def however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which plan is made, and whether, does not depend on how busy the machine is."""
    for name, value in HOWEVER_BUSY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model behind the real command, with several tenants, on a free port of loopback."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "config.yaml"
    # What is fast on a busy machine is no question here: every plan that is right is made.
    always = {"min_saved_s": -3600.0, "min_saved_fraction": 0.0, "measure_at_start": False, "learn": False}
    document = {
        "auth": {"keys": _keys()},
        "store": {"path": str(folder / "store")},
        "cost": always,
        "control": {"unshared_share": 0.0},
        "sharing": {"max_risk": 1.0},  # nor what is certified of the forms model
        # Of prompts that come together one must not be stored while another is looked up; no search is late.
        "index": {"dense_min_tokens": 100_000, "search_timeout_s": 60.0, "embed_timeout_s": 60.0},
    }
    config.write_text(yaml.safe_dump(document))
    kvshare = Path(sys.executable).with_name("kvshare")
    options = ["--model", "demo", "--port", "0", "--config", str(config), "--format", "json"]
    command = [str(kvshare), "serve", *options]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            ready = ""
            for line in process.stdout:
                ready += line
                if line.rstrip() == "}" or line.rstrip().endswith("}"):
                    break
            assert ready, (folder / "stderr").read_text()
            yield Server(json.loads(ready)["url"], process)
        finally:
            process.terminate()
            assert process.wait(timeout=60) == 0
            process.stdout.close()
