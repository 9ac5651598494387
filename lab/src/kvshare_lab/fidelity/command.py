"""Behind `kvshare bench fidelity`: which stages or chains are measured, and in which folder they lie."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvshare.errors import ConfigError
from kvshare.served_model import find_model
from kvshare.settings import load_settings
from kvshare_lab.bench.harness import chosen
from kvshare_lab.fidelity import chains as edited
from kvshare_lab.fidelity import laboratory as lab
from kvshare_lab.fidelity.report import publish
from kvshare_lab.fidelity.rows import STAGES_FILE, Shards, Stage, read_stages
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.suites import SUITES


def run(
    *,
    model: str = "default",
    suite: str | None = None,
    rules: str | None = None,
    budgets: str = "0.1,0.2",
    charged: str = "",
    plans: int = 40,
    half: int = 0,
    data: Path | None = None,
    out: Path = Path("fidelity"),
    stage: str | None = None,
    part: str = "0/1",
    minutes: float = 24 * 60.0,
    rank: bool = False,
    free_tokens: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    report: bool = False,
    chains: int | None = None,
    turns: int = 40,
    places: int = 0,
    edits: int = 1,
    prompt_tokens: int = 1500,
    max_deviation: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Measure what is left of the stages in `out/stages.yaml`; without that file, or with `suite`, of one stage
    made of the options. `report`: write the report, too.

    `chains`: measure so many chains of edits instead, see chains.py; the options behind it are theirs.
    Raises:  ConfigError for a wrong option, or an unknown stage, suite or rule; ModelError
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if chains is not None:
        options = edited.Options(
            turns=turns, places=places, edits=edits, prompt_tokens=prompt_tokens, seed=seed, half=half
        )
        overrides = {"model.path": model, "sharing.max_deviation": max_deviation}
        measured = asyncio.run(edited.measure(chains, options, data=data, overrides=overrides))
        return {"out": None, **measured}
    if suite is None and (out / STAGES_FILE).exists():
        stages = _stages_of(out / STAGES_FILE, stage or "")
    else:
        names = chosen(suite or "", SUITES, "--suite") or [name for name in SUITES if name != "log"]
        own = Stage(
            name=stage or f"half-{half}",
            half=half,
            plans=dict.fromkeys(names, plans),
            rules=tuple(chosen(rules or "", RULES, "--rules") or RULES),
            budgets=_numbers("--budgets", budgets),
            charged=_numbers("--charged", charged),
            rank=rank,
            free_tokens=free_tokens,
            noise=True,
        )
        stages = [own]
    lab.check(stages)
    computed = {"device": device, "dtype": dtype}
    counts = _measure(stages, Shards(out, *_part(part)), model, data=data, minutes=minutes, computed=computed)
    where = {"out": str(out), "data": None if data is None else str(data)}
    return {**where, **counts, **({"report": publish(out)} if report else {})}


def _stages_of(path: Path, names: str) -> list[Stage]:
    """The stages of the file with these names, or all. Raises ConfigError for one that it does not have."""
    stages = read_stages(path)
    wanted = chosen(names, [each.name for each in stages], "--stage")
    return [each for each in stages if not wanted or each.name in wanted]


def _measure(
    stages: Sequence[Stage],
    shards: Shards,
    model: str,
    *,
    data: Path | None,
    minutes: float,
    computed: Mapping[str, str],
) -> dict[str, int]:
    """How many plans were measured and how many are left. Where that is none, no model is loaded."""
    left = sum(1 for _ in shards.left(stages))
    if not left or minutes <= 0:
        return {"measured": 0, "left": left}
    noise = any(each.noise for each in stages)
    served = find_model(model, download=True)
    laboratory = lab.Laboratory.open(served, load_settings(), data=data, noise=noise, **computed)
    return lab.work(laboratory, shards, stages, minutes=minutes)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(",") if number.strip())
    except ValueError:
        raise ConfigError(option, f"expected numbers like 0.1,0.2, got {text!r}") from None


def _part(text: str) -> tuple[int, int]:
    number, _, total = text.partition("/")
    if not (number.isdigit() and total.isdigit() and int(number) < int(total)):
        raise ConfigError("--part", f"expected NUMBER/PARTS such as 0/2 or 1/2, got {text!r}")
    return int(number), int(total)
