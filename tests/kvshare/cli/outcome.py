"""How a process of the command line ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)
