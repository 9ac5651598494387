"""A `kvshare serve` as a process of its own, on a free port of the loopback, and what a client may ask it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvshare.demo import MODEL_PATH
from tests.conftest import unsettled

START_S = 180
# Nothing here is about meaning, and loading the embedder takes a second.
# What is fast on a busy machine is no question here: every plan that is right is made, and no search is late.
CONFIG = """\
index: {dense: false, search_timeout_s: 60.0}
logging: {json: true}
control: {unshared_share: 0.0}
sharing: {max_risk: 1.0}
cost: {min_saved_s: -3600.0, min_saved_fraction: 0.0, measure_at_start: false, learn: false}
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]
    log_file: Path

    @property
    def log(self) -> list[str]:
        """The messages logged so far."""
        lines = self.log_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["message"] for line in lines if line.startswith("{")]

    def logged(self, what: str) -> list[str]:
        """Those that contain `what`."""
        return [message for message in self.log if what in message]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        return self._send(urllib.request.Request(self.url + path))

    def ready(self) -> tuple[int, str]:
        """Status and detail of /ready."""
        status, body = self.get("/ready")
        return status, json.loads(body)["detail"]

    def metric(self, name: str, **labels: str) -> float:
        """One sample; 0 where there is none."""
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
        }
        return samples.get((name, frozenset(labels.items())), 0.0)

    def complete(self, tokens: Sequence[int], **body: Any) -> dict[str, Any]:
        """The answer to a prompt of token ids, greedy; it must be 200."""
        model = json.loads(self.get("/v1/models")[1])["data"][0]["id"]
        asked = {"model": model, "prompt": list(tokens), "temperature": 0, "max_tokens": 4, **body}
        return self.post("/v1/completions", asked)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a body; it must be 200. What comes of its prompt has come."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        status, answer = self._send(request)
        assert status == 200, answer
        self._settle()
        document: dict[str, Any] = json.loads(answer)
        return document

    def _settle(self) -> None:
        """Until all prompts that were answered are stored and in the index, as far as there is room."""
        eventually(lambda: not unsettled(json.loads(self.get("/admin/requests")[1])["requests"]))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=START_S)

    def _send(self, request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=START_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextmanager
def serving(
    folder: Path,
    *options: object,
    config: str = "",
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    while_loading: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Iterator[Served]:
    """
    The bundled forms model behind `kvshare serve`, started in `folder`.

    `config` is added to the configuration; `prefix` goes before the command, such as `unshare --mount`.
    """
    settings = folder / "kvshare.yaml"
    settings.write_text(CONFIG + config, encoding="utf-8")
    command = [
        *prefix,
        *(sys.executable, "-m", "kvshare.cli.main", "serve", "--config", str(settings), "--port", "0"),
        *("--model", str(MODEL_PATH), "--format", "json"),
        *map(str, options),
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHARE_")}
    log_file = folder / "log"
    with (
        log_file.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, cwd=folder, env={**clean, **(env or {})}, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            if while_loading is not None:
                eventually(lambda: "listening on" in log_file.read_text(encoding="utf-8"))
                while_loading(process)
            assert process.stdout is not None
            document = "".join(takewhile(lambda line: line != "}\n", process.stdout))
            assert document, log_file.read_text(encoding="utf-8")
            yield Served(json.loads(document + "}")["url"], process, log_file)
        finally:
            if process.poll() is None:
                process.kill()


def eventually(condition: Callable[[], object], *, timeout_s: float = START_S) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
