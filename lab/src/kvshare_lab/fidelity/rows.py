"""
The measured rows in their folder: which plans are left to measure; and the plans with all of their arms.

    FOLDER/stages.yaml           the stages, in the order in which they are measured
    FOLDER/STAGE/SUITE-0.jsonl   a line per plan, appended as soon as it is measured: no text, no token ids

A run that is killed loses the plan that it was measuring. Several processes share the work by `part`.

A plan in several files gets the arms of all of them, and an arm the measures of all. Of a measure that comes
twice, the later line counts; files are read in the order of their names.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, Field, ValidationError

from kvshare.errors import ConfigError, LogError
from kvshare_lab.fidelity.scenario import INSTRUMENT
from kvshare_lab.fidelity.statistics import Floats, Pairs

STAGES_FILE = "stages.yaml"
_NEEDED: Final = {"suite", "half", "number", "source", "labels", "model", "tokens", "arms"}

Row = dict[str, Any]


class Stage(BaseModel, frozen=True, extra="forbid"):
    """Plans to measure, and how. The same number of a suite is the same plan in every stage of a half."""

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


class _Stages(BaseModel, extra="forbid"):
    stages: tuple[Stage, ...]


class Task(NamedTuple):
    stage: Stage
    suite: str
    number: int


@dataclass(slots=True)
class Shards:
    """The folder of one model's rows, and which of them this process measures: part `part` of `parts`."""

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
        made = self._done.get((stage.name, suite, number), stage.digest)
        if made != stage.digest:
            raise ConfigError(
                f"stage {stage.name}",
                f"{self.folder / stage.name} has rows with other rules, budgets or measures, or of another "
                "version of the lab; choose another name with --stage, or another folder with --out",
            )
        return (stage.name, suite, number) in self._done

    def has(self, task: Task) -> bool:
        """Whether the task is done."""
        return self._is_done(*task)

    def add(self, task: Task, row: Row) -> None:
        """Append a measured plan, or why there is none. An unfinished last line is cut off before."""
        path = self.folder / task.stage.name / f"{task.suite}-{self.part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**row, "made": task.stage.digest}, separators=(",", ":")) + "\n"
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())
        self._done[(task.stage.name, task.suite, task.number)] = task.stage.digest


def rows_of(path: Path) -> Iterator[Row]:
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


class Setting(NamedTuple):
    """A rule and its budget. `by`: "b", the budget is for repairs; "charged", for the selection too."""

    rule: str
    by: str
    budget: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan. `row`: the line without its arms. Measures of an arm's free-running answer are `free_...`."""

    suite: str
    source: str
    row: Mapping[str, Any]
    arms: Mapping[Setting, Mapping[str, Any]]

    def measure(self, setting: Setting, name: str) -> float | None:
        """A measure of the arm with this setting; None if there is none."""
        return self.arms.get(setting, {}).get(name)


def read_plans(folder: Path, *, half: int | None = None, model: str | None = None) -> list[Plan]:
    """
    The plans of one half and one model, by suite and number.

    Raises:  LogError where there are no plans, halves or models are mixed, or a line is not a measured plan
    """
    found: dict[tuple[str, str, int, int], Row] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for row in _lines(path):
            if half in (None, row["half"]) and model in (None, row["model"]):
                key = (row["model"], row["suite"], row["half"], row["number"])
                found[key] = _merged(found.get(key), row, path)
    if not found:
        wanted = f"half {'any' if half is None else half}, model {model or 'any'}"
        raise LogError(f"{folder}: no measured plan ({wanted})")
    for name in ("model", "half"):
        if len(several := {row[name] for row in found.values()}) > 1:
            raise LogError(f"{folder}: rows of more than one {name}, choose one of {sorted(several)}")
    return [
        Plan(row["suite"], row["source"], {**row, "arms": None}, row["arms"])
        for _, row in sorted(found.items())
    ]


def by_suite(plans: Iterable[Plan]) -> dict[str, list[Plan]]:
    """The plans of each suite, which stand together."""
    return {suite: [*own] for suite, own in groupby(plans, key=lambda plan: plan.suite)}


def values(plans: Sequence[Plan], setting: Setting, name: str = "kl") -> tuple[Floats, list[str]]:
    """A measure of the plans that have it, and their sources."""
    has = [plan for plan in plans if plan.measure(setting, name) is not None]
    return np.array([plan.measure(setting, name) for plan in has], float), [plan.source for plan in has]


def pairs(plans: Sequence[Plan], ours: Setting, theirs: Setting, name: str = "kl") -> Pairs:
    """A measure of the plans for which both have it."""
    both = [plan for plan in plans if None not in (plan.measure(ours, name), plan.measure(theirs, name))]
    own, sources = values(both, ours, name)
    return Pairs(sources, own, values(both, theirs, name)[0])


def setting_of(plans: Sequence[Plan], rule: str, by: str, budget: float) -> Setting | None:
    """That rule at that budget; of a rule without budgets (only 0 or 1 was measured) its only setting."""
    known = {setting for plan in plans for setting in plan.arms if setting.rule == rule}
    if (exact := Setting(rule, by, budget)) in known:
        return exact
    return min(known, default=None) if all(setting.budget in (0, 1) for setting in known) else None


def count_unable(plans: Sequence[Plan], setting: Setting) -> int:
    """The number of plans for which the rule's selection alone exceeds the budget."""
    return sum(bool(plan.arms.get(setting, {}).get("cannot")) for plan in plans)


def _lines(path: Path) -> Iterator[Row]:
    """The measured plans of a file, without an unfinished last line of a killed run."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line, parse_constant=_no_measure)
                if "skipped" in row:
                    continue
                if missing := _NEEDED - row.keys():
                    raise KeyError(*missing)
                row["arms"] = {
                    Setting(arm["rule"], arm["by"], round(float(arm["budget"]), 6)): _flat(arm)
                    for arm in row["arms"]
                }
                yield row
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number < len(lines):
                    raise LogError(f"{path}:{number}: not a measured plan: {error}") from error


def _no_measure(constant: str) -> float:
    raise ValueError(f"{constant} is no measure, expected a finite number")


def _flat(arm: Row) -> Row:
    return {**arm, **{f"free_{name}": value for name, value in (arm.get("free") or {}).items()}}


def _merged(earlier: Row | None, row: Row, path: Path) -> Row:
    if earlier is None:
        return row
    for name in ("source", "tokens"):
        if earlier[name] != row[name]:
            where = f"{path}: {row['suite']} {row['number']}"
            raise LogError(f"{where}: {name} is {row[name]!r}, but {earlier[name]!r} in an earlier line")
    arms = {
        setting: {**earlier["arms"].get(setting, {}), **row["arms"].get(setting, {})}
        for setting in (*earlier["arms"], *row["arms"])
    }
    return {**earlier, **row, "arms": arms}
