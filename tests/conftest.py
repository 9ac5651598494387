"""Shared by all tests: no hub is ever reached; a real server as its users start it."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("kvshare", deadline=None)  # a busy machine is no failure
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
        # Of prompts that come together one must not be stored while another is looked up.
        "index": {"dense_min_tokens": 100_000},
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
