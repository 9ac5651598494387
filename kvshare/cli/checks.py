"""
What `kvshare doctor` looks at: one small function per question, each answering with a `Check`.

Here: the machine and the config. `model_checks` and `store_checks` ask the rest. No check loads weights,
talks to the internet or leaves a file behind.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kvshare.errors import ConfigError

if TYPE_CHECKING:
    from kvshare.settings import Settings


class State(StrEnum):
    """ok: fine; warn: it serves, but not as it could; fail: it does not serve."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it if it is not fine."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def check_torch() -> Check:
    """torch can be imported, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as exc:
        return Check("torch", State.FAIL, f"cannot be imported: {exc}", "reinstall it: pip install torch")
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return Check("torch", State.OK, f"{torch.__version__} on {where}")


def check_sqlite(version: tuple[int, int, int]) -> Check:
    """SQLite has no known bug that corrupts a WAL database: two connections that write at once."""
    from delta_tree.storage import journal_mode_for

    found = ".".join(str(part) for part in version)
    if journal_mode_for(version) == "WAL":
        return Check("sqlite", State.OK, found)
    return Check(
        "sqlite",
        State.WARN,
        f"{found} has the WAL-reset bug (3.7.0 to 3.51.2); one writer per store, as here, does not meet it",
        "open the store with no other program while the server runs, or install SQLite 3.51.3 or newer",
    )


def check_config(path: Path | None) -> tuple[Settings | None, Check]:
    """The settings, if the config is valid."""
    from kvshare.settings import load_settings

    try:
        settings = load_settings(path)
    except ConfigError as exc:
        return None, Check("config", State.FAIL, str(exc), "correct this key; config.yaml explains each")
    return settings, Check("config", State.OK, "the defaults" if path is None else str(path))


def check_port(settings: Settings) -> Check:
    """The server's address can be listened on."""
    host, port = settings.server.host, settings.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        taken = exc.errno == errno.EADDRINUSE
        remedy = "stop the server that listens there, or set server.port" if taken else "set server.host"
        return Check("port", State.FAIL, f"{host}:{port}: {exc.strerror or exc}", remedy)
    return Check("port", State.OK, f"{host}:{port} is free")


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
