"""
What is measured and what is left: stages of work, done shard by shard in any number of runs.

    FOLDER/stages.yaml           what is to be measured, in its order
    FOLDER/STAGE/SUITE-0.jsonl   a line per plan, appended as soon as it is measured: no text, no token ids

A run that is killed loses the plan it was at. Several processes share the work by `part`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshare.errors import ConfigError

STAGES_FILE = "stages.yaml"


class Stage(BaseModel):
    """One pass over plans. The same number is the same plan in every stage with that half."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    half: int = Field(ge=0, le=1)
    plans: dict[str, int]  # by suite
    rules: tuple[str, ...]
    budgets: tuple[float, ...] = (0.1,)
    charged: tuple[float, ...] = ()
    rank: bool = False
    free_tokens: int = 0
    noise: bool = False


class _Stages(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One plan of a stage."""

    stage: Stage
    suite: str
    number: int


@dataclass(slots=True)
class Shards:
    """The folder of one model's figures."""

    folder: Path
    part: int = 0
    parts: int = 1
    _done: set[tuple[str, str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*/*.jsonl")):
            for row in rows_of(path):
                self._done.add((path.parent.name, row["suite"], row["number"]))

    def left(self, stages: Sequence[Stage]) -> Iterator[Task]:
        """This part's tasks that are not done; the suites of a stage take turns."""
        for stage in stages:
            for number in range(max(stage.plans.values(), default=0)):
                for suite, plans in stage.plans.items():
                    mine = zlib.crc32(f"{suite}:{number}".encode()) % self.parts == self.part
                    if number < plans and mine and (stage.name, suite, number) not in self._done:
                        yield Task(stage, suite, number)

    def add(self, task: Task, row: dict[str, Any]) -> None:
        """Append a measured plan, or why there is none."""
        path = self.folder / task.stage.name / f"{task.suite}-{self.part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, separators=(",", ":")) + "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(("\n" if _is_torn(path) else "") + line)
        self._done.add((task.stage.name, task.suite, task.number))


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    text = path.read_bytes()
    return bool(text) and not text.endswith(b"\n")


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a shard; the last one of a killed run may be torn and is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_stages(path: Path) -> tuple[Stage, ...]:
    """Raises ConfigError naming the file and the key."""
    try:
        return _Stages.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).stages
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), f"cannot be read as YAML: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path.name}: {where}", f"{first['msg']}, got {first['input']!r}") from exc
