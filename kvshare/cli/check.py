"""A finding of `kvshare doctor`: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


class CheckState(StrEnum):
    OK = "ok"
    WARN = "warn"  # it serves, but not as it could
    FAIL = "fail"  # it does not serve


@dataclass(frozen=True, slots=True)
class Check:
    """A check: what was looked at, what was found, and what to do if it is not fine."""

    name: str
    state: CheckState
    detail: str
    remedy: str = ""


class Checked(StrEnum):
    """The subjects of checks. A check that is not ok comes with a remedy."""

    # This machine, the config, and what they store.
    PYTHON = auto()
    SQLITE = auto()
    CONFIG = auto()
    LIBRARIES = auto()
    TORCH = auto()
    MODEL = auto()
    TOKENIZER = auto()
    GEOMETRY = auto()
    STORE = auto()
    DISK = auto()
    SHARED = auto()
    INDEX = auto()
    EMBEDDER = auto()
    PORT = auto()
    PAGES = auto()
    # A running server of ours.
    COSTS = auto()
    BREAK_EVEN = "break-even"
    PART = auto()
    CONTROLLER = auto()
    # A running vLLM.
    VLLM = auto()
    FORMATS = auto()
    VERSION = auto()
    MODELS = auto()
    RENDER = auto()
    CONTROL = auto()
    RANKS = auto()
    PROTOCOL = auto()
    SHARING = auto()
    CONNECTOR = auto()
    KVSHARE = auto()
    MEMORY = auto()
    POLICY = auto()
    PREFIXES = auto()
    DETAILS = auto()
    SETTINGS = auto()

    def ok(self, detail: object, remedy: str = "") -> Check:
        """It is fine. `remedy`: how to learn more, where it is not known."""
        return Check(self.value, CheckState.OK, str(detail), remedy)

    def warn(self, detail: object, remedy: str) -> Check:
        return Check(self.value, CheckState.WARN, str(detail), remedy)

    def fail(self, detail: object, remedy: str) -> Check:
        return Check(self.value, CheckState.FAIL, str(detail), remedy)
