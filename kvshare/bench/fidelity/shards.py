"""
What is measured and what is left: stages of work, done in any number of runs.

    FOLDER/stages.yaml           the stages, in the order in which they are measured
    FOLDER/STAGE/SUITE-0.jsonl   a line per plan, appended as soon as it is measured: no text, no token ids

A run that is killed loses the plan that it was measuring. Several processes share the work by `part`.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshare.bench.fidelity.scenario import INSTRUMENT
from kvshare.errors import ConfigError

STAGES_FILE = "stages.yaml"


class Stage(BaseModel):
    """Plans to measure, and how. The same number of a suite is the same plan in every stage of a half."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    half: int = Field(ge=0, le=1)
    plans: dict[str, int]  # by suite
    rules: tuple[str, ...]
    budgets: tuple[float, ...] = (0.1,)
    charged: tuple[float, ...] = ()  # budgets that pay for the selection too
    rank: bool = False  # score the candidates
    free_tokens: int = 0  # of the free-running answer; 0: none
    noise: bool = False

    @property
    def digest(self) -> str:
        """Identifies how rows are measured: all fields but name and plans, and the instrument's version."""
        fields = self.model_dump_json(exclude={"name", "plans"})  # in their order, which must not change
        return hashlib.sha256(f"{INSTRUMENT}:{fields}".encode()).hexdigest()[:8]


class _Stages(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: tuple[Stage, ...]


class Task(NamedTuple):
    """One plan of a stage."""

    stage: Stage
    suite: str
    number: int


@dataclass(slots=True)
class Shards:
    """
    The folder of one model's rows, and which of them this process measures: part `part` of `parts`.
    """

    folder: Path
    part: int = 0
    parts: int = 1
    models: set[str] = field(default_factory=set)  # of the rows
    _done: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*/*.jsonl")):
            for row in rows_of(path):
                self._done[(path.parent.name, row["suite"], row["number"])] = row.get("made", "")
                self.models.add(row["model"])

    def left(self, stages: Sequence[Stage]) -> Iterator[Task]:
        """
        The tasks of this part that are not done; the suites of a stage take turns.

        Raises:  ConfigError where the folder has rows of a stage that were measured in another way
        """
        for stage in stages:
            for number in range(max(stage.plans.values(), default=0)):
                for suite, plans in stage.plans.items():
                    mine = zlib.crc32(f"{suite}:{number}".encode()) % self.parts == self.part
                    if number < plans and mine and not self._is_done(stage, suite, number):
                        yield Task(stage, suite, number)

    def _is_done(self, stage: Stage, suite: str, number: int) -> bool:
        made = self._done.get((stage.name, suite, number))
        if made not in (None, stage.digest):
            raise ConfigError(
                f"stage {stage.name}",
                f"{self.folder / stage.name} has rows with other rules, budgets or measures, or of another "
                "version of the lab; choose another name with --stage, or another folder with --out",
            )
        return made is not None

    def add(self, task: Task, row: dict[str, Any]) -> None:
        """Append a measured plan, or why there is none. An unfinished last line is cut off before."""
        path = self.folder / task.stage.name / f"{task.suite}-{self.part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_bytes() if path.exists() else b""
        line = json.dumps({**row, "made": task.stage.digest}, separators=(",", ":")) + "\n"
        with path.open("r+b" if known else "wb") as file:
            file.truncate(known.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(line.encode())
        self._done[(task.stage.name, task.suite, task.number)] = task.stage.digest


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a shard, without an unfinished line of a killed run."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_stages(path: Path) -> tuple[Stage, ...]:
    """Raises ConfigError that names the file and the key."""
    try:
        return _Stages.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).stages
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), f"cannot be read as YAML: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path.name}: {where}", f"{first['msg']}, got {first['input']!r}") from exc
