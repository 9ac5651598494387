"""How a command ends: the exit codes, and which error means which."""

from __future__ import annotations

from enum import IntEnum

from kvshare.errors import ConfigError, KVShareError, UnreachableError


class ExitCode(IntEnum):
    """Stable; scripts rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2  # wrong arguments or a wrong config file
    UNREACHABLE = 3  # no server answers


class AnswerError(KVShareError):
    """The server answered, but not with what was asked for."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.url = url
        self.status = status
        self.message = message


def exit_code(error: KVShareError) -> ExitCode:
    """The exit code of a command that ended with this error."""
    if isinstance(error, UnreachableError):
        return ExitCode.UNREACHABLE
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    return ExitCode.FAILED
