"""The table of architectures in docs/models.md is what its data give, and the README's count is theirs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "lab/scripts/models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_its_data(script: ModuleType) -> None:
    """Of the architectures that it lists itself; whether those are vLLM's is asked where vLLM is."""
    page = script.PAGE.read_text("utf-8")
    rows = page.split(script.BEGIN)[1].split(script.END)[0]
    cells = [line.split("|")[3] for line in rows.splitlines()[2:]]
    names = [name.removesuffix(" (tested)") for cell in cells for name in cell.strip().split(", ") if name]
    assert len(names) == len(set(names)) > 200
    measured = json.loads(script.MEASURED.read_text("utf-8"))
    assert script.with_table(page, script.table(names, measured)) == page


def test_a_registry_is_read_without_running_it(script: ModuleType) -> None:
    """The generative groups of it."""
    source = """
import vllm_of_another_version
_TEXT_GENERATION_MODELS = {"A": ("a", "AClass")}
_EMBEDDING_MODELS = {"B": ("b", "BClass")}
_MULTIMODAL_MODELS = {"C": ("c", "CClass")}
"""
    assert script.names_in(source) == {"A": "AClass", "C": "CClass"}


def test_every_architecture_of_the_data_is_on_the_page(script: ModuleType) -> None:
    page = script.PAGE.read_text("utf-8")
    listed = {name for names in script.DATA["unshared"].values() for name in names}
    assert {name for name in listed | set(script.DATA["same_position"]) if name not in page} == set()


def test_every_tested_kind_is_one_that_the_tests_have(script: ModuleType) -> None:
    """And it passed, or the table would not say so."""
    from kvshare_lab.bench.random_models import ARCHITECTURES
    from kvshare_lab.vllm.kinds import MULTIMODAL, TEXT

    kinds = json.loads(script.MEASURED.read_text("utf-8"))["kinds"]
    assert kinds.keys() <= {*ARCHITECTURES, *TEXT, *MULTIMODAL}
    assert {kind["outcome"] for kind in kinds.values()} <= {"passed", "skipped"}


def test_the_readme_counts_what_the_script_counts(script: ModuleType) -> None:
    said = " ".join((ROOT / "README.md").read_text("utf-8").split())
    measured = json.loads(script.MEASURED.read_text("utf-8"))
    sentence = script.recipes(measured)
    numbers = re.findall(r"\d+", sentence)
    shared, total, share, tested, admitted, _, _, speculating, its_share = numbers
    assert f"{shared} of vLLM's {total} recipes for generative models ({share} %)." in said
    assert f"{speculating} recipes are left ({its_share} %)." in said
    assert f"For {tested} of the {shared} a tiny random model" in said
    assert f"for the other {admitted} none" in said
    assert int(tested) >= 45
    assert int(shared) >= 58


def test_each_recipe_is_counted_once(script: ModuleType) -> None:
    """By the architecture that it loads; what the lists name is one of them."""
    named = [model for group in script.RECIPES["groups"] for model in group["models"]]
    assert len(named) == len(set(named))
    for extra in ("fp8", "heads", "mtp", "eagle"):
        assert set(script.RECIPES[extra]) <= set(named)
    found = script.recipe_states(json.loads(script.MEASURED.read_text("utf-8")))
    assert sorted(model for models in found.values() for model in models) == sorted(named)
