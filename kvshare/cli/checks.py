"""
What `kvshare doctor` looks at: one small function per question, each answering with a `Check`. What it may
find is in doctor.yaml.

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

import yaml

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


_FINDINGS = yaml.safe_load(Path(__file__).with_name("doctor.yaml").read_text(encoding="utf-8"))


def found(finding: str, **words: object) -> Check:
    """A finding of doctor.yaml, as "port.taken": the name of the check, and what came of it."""
    name, _, kind = finding.partition(".")
    state, *texts = _FINDINGS[name][kind]
    return Check(name, State(state), *(text.format(**words) for text in texts))


def check_torch() -> Check:
    """torch can be imported, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as exc:
        return found("torch.broken", problem=exc)
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return found("torch.computes", version=torch.__version__, where=where)


def check_sqlite(version: tuple[int, int, int]) -> Check:
    """SQLite has no known bug that corrupts a WAL database: two connections that write at once."""
    from delta_tree.storage import journal_mode_for

    fine = journal_mode_for(version) == "WAL"
    return found("sqlite.fine" if fine else "sqlite.wal reset", version=".".join(map(str, version)))


def check_config(path: Path | None) -> tuple[Settings | None, Check]:
    """The settings, if the config is valid."""
    from kvshare.settings import load_settings

    try:
        return load_settings(path), found("config.read", where=path or "the defaults")
    except ConfigError as exc:
        return None, found("config.wrong", problem=exc)


def check_port(settings: Settings) -> Check:
    """The server's address can be listened on."""
    host, port = settings.server.host, settings.server.port
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        taken = exc.errno == errno.EADDRINUSE
        return found("port.taken" if taken else "port.refused", where=where, problem=exc.strerror or exc)
    return found("port.free", where=where)


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
