"""The runner: tasks that are left, one after another, until there are none or the time is up."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delta_tree import Span
from kvshare.bench.fidelity.arms import Arms, make_trial, measured
from kvshare.bench.fidelity.chain import measured_chain
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.scenario import SEED, Scenario, tokenized
from kvshare.bench.fidelity.shards import Shards, Stage, Task
from kvshare.bench.fidelity.shelf import Shelf
from kvshare.bench.fidelity.suites import SUITES
from kvshare.bench.fidelity.suites.library import Library
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.errors import ConfigError
from kvshare.served_model import ServedModel
from kvshare.settings import Settings
from kvshare.sharing.plan import NoPlan, clip

log = logging.getLogger(__name__)

_Drawn = tuple[bytes, int]  # a prompt's digest, and which attempt at its number made it

_ATTEMPTS = 12  # drafts of a number until one fits
_SHORTEST, _LONGEST = 250, 1500  # tokens of a prompt
_LEAST_COPIED = 0.2  # of a prompt: with less, a budget of a tenth computes it all again


@dataclass(eq=False)
class Laboratory:
    """A model, its tokenizer, the documents, and what KVShare's settings say."""

    model: LayeredModel
    encoder: PromptEncoder
    settings: Settings
    data: Path | None
    other: LayeredModel | None = None  # the same model in bfloat16
    name: str = ""
    log: Path | None = None  # requests of one's own, for the suite of that name
    _libraries: dict[int, Library] = field(default_factory=dict)
    _drawn: dict[tuple[str, int], list[_Drawn | None]] = field(default_factory=dict)

    @classmethod
    def open(
        cls, served: ServedModel, settings: Settings, *, data: Path | None, noise: bool, device: str = "cpu"
    ) -> Laboratory:
        """Raises ModelError for a model that the lab cannot run."""
        path, name = served.path, served.name
        model = LayeredModel(EmbeddedModel.load(path, name=name, dtype="float32", device=device))
        other = None
        if noise:
            other = LayeredModel(EmbeddedModel.load(path, name=name, dtype="bfloat16", device=device))
        return cls(model, PromptEncoder.load(path), settings, data, other, name)

    def scenario(self, suite: str, half: int, number: int) -> Scenario | None:
        """
        The number-th scenario of a suite: the first draft that has the right length, can be shared, and is no
        earlier number's prompt. None where there is none.
        """
        found = self._drawn.setdefault((suite, half), [])
        while len(found) <= number:
            known = {drawn[0] for drawn in found if drawn is not None}
            found.append(self._draw(suite, half, len(found), known))
        drawn = found[number]
        return None if drawn is None else self._made(suite, half, number, drawn[1])

    def _draw(self, suite: str, half: int, number: int, known: set[bytes]) -> _Drawn | None:
        for attempt in range(_ATTEMPTS):
            scenario = self._made(suite, half, number, attempt)
            if scenario is None:
                continue
            digest = hashlib.sha256(scenario.prompt.token_ids.tobytes()).digest()
            if digest not in known and self._is_usable(scenario):
                return digest, attempt
        return None

    def _made(self, suite: str, half: int, number: int, attempt: int) -> Scenario | None:
        library = self._libraries.setdefault(half, Library(self.data, half, self.log))
        draw = random.Random(f"{SEED}:{suite}:{half}:{number}:{attempt}")
        draft = SUITES[suite](library, number, draw)
        return None if draft is None else tokenized(draft, self.encoder, suite=suite, number=number)

    def _is_usable(self, scenario: Scenario) -> bool:
        prompts = (*scenario.stored, *scenario.stages, scenario.prompt)
        longest = min(_LONGEST, self.model.model.max_model_len - 64)
        if not all(_SHORTEST <= len(prompt) <= longest for prompt in prompts):
            return False
        found = self.shelf(scenario).compose(scenario.prompt.token_ids)
        approximate = Span(found.exact_length, len(scenario.prompt) - self.settings.repair.tail)
        copied = sum(part.length for copy in found.copies if (part := clip(copy, approximate)))
        return copied >= _LEAST_COPIED * len(scenario.prompt)

    def shelf(self, scenario: Scenario) -> Shelf:
        """The scenario's stored prompts without their KV: enough to plan."""
        shelf = Shelf(self.settings.sharing)
        for prompt in (*scenario.stored, *scenario.stages):
            shelf.store(prompt.token_ids, None, NoPlan())
        return shelf

    def measure(self, task: Task) -> dict[str, Any]:
        """The row of a task; a number without a usable draft says so."""
        began = time.perf_counter()
        key = {"suite": task.suite, "half": task.stage.half, "number": task.number, "model": self.name}
        scenario = self.scenario(task.suite, task.stage.half, task.number)
        if scenario is None:
            return {**key, "skipped": "no draft"}
        if scenario.stages:
            row = measured_chain(scenario, self.model, self.settings, self._arms(task.stage))
        elif (trial := make_trial(scenario, self.model, self.settings)) is None:
            return {**key, "skipped": "nothing copied"}
        else:
            row = measured(trial, self._arms(task.stage), other=self.other if task.stage.noise else None)
        return {**key, **row, "seconds": round(time.perf_counter() - began, 1)}

    def _arms(self, stage: Stage) -> Arms:
        return Arms(
            rules=[RULES[name] for name in stage.rules],
            budgets=stage.budgets,
            charged=stage.charged,
            rank=stage.rank,
            free_tokens=stage.free_tokens,
            decode=lambda tokens: self.encoder.backend.decode(tokens.tolist(), skip_special_tokens=True),
            noise=stage.noise,
        )


def check(stages: Sequence[Stage]) -> None:
    """Raises ConfigError for a suite or a rule that there is not."""
    known: Mapping[str, tuple[Sequence[str], str]] = {
        "rules": (list(RULES), "rule"),
        "plans": (list(SUITES), "suite"),
    }
    for stage in stages:
        for attribute, (names, kind) in known.items():
            for name in getattr(stage, attribute):
                if name not in names:
                    raise ConfigError(f"{stage.name}.{attribute}", f"no {kind} {name!r}; there are {names}")


def work(
    laboratory: Laboratory, shards: Shards, stages: Sequence[Stage], *, minutes: float
) -> dict[str, int]:
    """Measure what is left until the time is up. Returns how many plans were measured and are left."""
    if shards.models - {laboratory.name}:
        raise ConfigError(
            "--out", f"{shards.folder} has rows of {sorted(shards.models)}, not of {laboratory.name}"
        )
    end = time.monotonic() + 60 * minutes
    done, tasks = 0, list(shards.left(stages))
    for task in tasks:
        if time.monotonic() > end:
            break
        shards.add(task, laboratory.measure(task))
        done += 1
        if done % 10 == 0:
            log.info("%s: %d plans measured, %d left", task.stage.name, done, len(tasks) - done)
    return {"measured": done, "left": len(tasks) - done}
