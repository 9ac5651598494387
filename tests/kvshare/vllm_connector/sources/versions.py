"""The installed vLLM, and the one whose sources were fetched: `make long VLLM=0.33` names its folder."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path

import pytest

from tests.kvshare.vllm_connector.sources.vllm_sources import Found, Sources

VARIABLE = "KVSHARE_VLLM_SOURCES"
_trees: dict[str, Sources] = {}


def installed() -> Path | None:
    spec = util.find_spec("vllm")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else None


def sources_of(which: str) -> Sources:
    root = installed() if which == "installed" else Path(os.environ.get(VARIABLE) or "none")
    if root is None or not (root / "vllm" / "__init__.py").is_file():
        wanted = "vLLM is not installed" if which == "installed" else f"{VARIABLE} names no folder with vLLM"
        pytest.skip(f"{wanted}: `make long VLLM=0.33` fetches the sources of another version")
    return _trees.setdefault(str(root), Sources(root))


def at(sources: Sources, place: str) -> Found:
    module, _, name = place.partition(":")
    found = sources.find(module, name)
    assert found is not None, f"{module} has no {name}"
    return found
