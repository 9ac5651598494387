"""Runs the tasks that are left, one after another, until none is left or the time is over."""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from delta_tree import Span, TokenIds
from kvshare.embedded.decoder import load_network
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.errors import ConfigError
from kvshare.served_model import ServedModel
from kvshare.settings import Settings
from kvshare.sharing.plan import NoPlan, within
from kvshare_lab.fidelity.arms import make_trial, measured, measured_chain
from kvshare_lab.fidelity.layered import LayeredModel
from kvshare_lab.fidelity.rows import Shards, Stage, Task
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.scenario import SEED, Scenario, tokenized
from kvshare_lab.fidelity.stored_prompts import StoredPrompts
from kvshare_lab.fidelity.suites import SUITES
from kvshare_lab.fidelity.suites.library import Library

log = logging.getLogger(__name__)

_ATTEMPTS = 12  # drafts of a number until one is usable
_SHORTEST, _LONGEST = 250, 1500  # tokens of a prompt
_LEAST_COPIED = 0.2  # of a prompt: of fewer copies, repairing a tenth of the prompt leaves too little


@dataclass(eq=False)
class Laboratory:
    """A model, its tokenizer, the documents, and KVShare's settings."""

    model: LayeredModel
    encoder: PromptEncoder
    settings: Settings
    data: Path | None
    other: LayeredModel | None = None  # the same model in bfloat16
    name: str = ""
    log: Path | None = None  # a file of requests, for the suite `log`
    _libraries: dict[int, Library] = field(default_factory=dict)
    _drawn: dict[tuple[str, int], list[Scenario | None]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        served: ServedModel,
        settings: Settings,
        *,
        data: Path | None,
        noise: bool,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> Self:
        """Raises ModelError for a model that cannot be run layer by layer."""

        def load(dtype: str) -> LayeredModel:
            network = load_network(path, dtype=dtype, device=device)
            return LayeredModel(EmbeddedModel(network, name=served.name))

        path = served.path
        model, other = load(dtype), load("bfloat16") if noise else None
        return cls(model, PromptEncoder.load(path), settings, data, other, served.name)

    def scenario(self, suite: str, half: int, number: int) -> Scenario | None:
        """
        The number-th scenario of a suite: the first draft of usable length and overlap whose prompt no
        earlier number has. None where none of the drafts is usable.
        """
        drawn = self._drawn.setdefault((suite, half), [])
        while len(drawn) <= number:
            known = {each.prompt.token_ids.tobytes() for each in drawn if each is not None}
            drawn.append(self._draw(suite, half, len(drawn), known))
        return drawn[number]

    def _draw(self, suite: str, half: int, number: int, known: set[bytes]) -> Scenario | None:
        library = self._libraries.setdefault(half, Library(self.data, half, self.log))
        for attempt in range(_ATTEMPTS):
            draw = random.Random(f"{SEED}:{suite}:{half}:{number}:{attempt}")
            if (draft := SUITES[suite](library, number, draw)) is None:
                continue
            scenario = tokenized(draft, self.encoder, suite=suite, number=number)
            if scenario.prompt.token_ids.tobytes() not in known and self._is_usable(scenario):
                return scenario
        return None

    def _is_usable(self, scenario: Scenario) -> bool:
        prompts = (*scenario.stored, *scenario.stages, scenario.prompt)
        longest = min(_LONGEST, self.model.model.max_model_len - 64)
        if not all(_SHORTEST <= len(prompt) <= longest for prompt in prompts):
            return False
        found = self.stored_prompts(scenario).compose(scenario.prompt.token_ids)
        approximate = Span(found.exact_length, len(scenario.prompt) - self.settings.repair.tail)
        copied = sum(copy.length for copy in within(found.copies, approximate))
        return copied >= _LEAST_COPIED * len(scenario.prompt)

    def stored_prompts(self, scenario: Scenario) -> StoredPrompts:
        """The scenario's stored prompts without their KV: enough to plan."""
        stored = StoredPrompts(self.settings.sharing)
        for prompt in (*scenario.stored, *scenario.stages):
            stored.store(prompt.token_ids, None, NoPlan())
        return stored

    def decode(self, tokens: TokenIds) -> str:
        return str(self.encoder.backend.decode(tokens.tolist(), skip_special_tokens=True))

    def measure(self, task: Task) -> dict[str, Any]:
        """The row of a task, or why there is none under `skipped`."""
        began, stage = time.perf_counter(), task.stage
        key = {"suite": task.suite, "half": stage.half, "number": task.number, "model": self.name}
        scenario = self.scenario(task.suite, stage.half, task.number)
        if scenario is None:
            return {**key, "skipped": "no draft"}
        if scenario.stages:
            row = measured_chain(scenario, self.model, self.settings, stage, decode=self.decode)
        elif (trial := make_trial(scenario, self.model, self.settings)) is None:
            return {**key, "skipped": "nothing copied"}
        else:
            row = measured(trial, stage, decode=self.decode, other=self.other)
        return {**key, **row, "seconds": round(time.perf_counter() - began, 1)}


def check(stages: Sequence[Stage]) -> None:
    """Raises ConfigError for an unknown suite or rule."""
    for stage in stages:
        for attribute, names, known in (("rules", stage.rules, RULES), ("plans", stage.plans, SUITES)):
            if unknown := [name for name in names if name not in known]:
                expected = f"expected one of {', '.join(known)}"
                raise ConfigError(f"{stage.name}.{attribute}", f"{unknown[0]!r} is unknown; {expected}")


def work(
    laboratory: Laboratory, shards: Shards, stages: Sequence[Stage], *, minutes: float
) -> dict[str, int]:
    """
    Measure what is left until the time is over. Returns how many plans were measured and how many are left.

    Raises:  ConfigError where the folder has rows of another model
    """
    if others := shards.models - {laboratory.name}:
        found = f"{shards.folder} has rows of the model {', '.join(sorted(others))}"
        raise ConfigError("--out", f"{found}, expected {laboratory.name}; choose another folder")
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
