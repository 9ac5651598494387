"""
Which versions of vLLM this was tested with, and which one is installed. Imports no vLLM.

The connector uses interfaces that vLLM changes between minor versions, so a version outside the range is told
loudly wherever it shows: by `kvshare vllm`, by `kvshare doctor` and by the connector itself.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata, util
from pathlib import Path

TESTED = (">=0.32", "<0.33")  # pyproject.toml's extra `vllm` says the same

_FIRST, _BEYOND = (tuple(int(part) for part in bound.lstrip("<>=").split(".")) for bound in TESTED)
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")


def untested(version: str) -> str | None:
    """Why this version is not a tested one, or None if it is. 0.33.0rc1 and 0.33.0+cpu count as 0.33.0."""
    release = _RELEASE.match(version)
    if release is None:
        return f"vLLM {version!r} has no version number, tested is {','.join(TESTED)}"
    if not _FIRST <= tuple(int(part) for part in release[1].split(".")) < _BEYOND:
        return f"vLLM {version} is not a tested version, tested is {','.join(TESTED)}"
    return None


def installed_version() -> str | None:
    """The version of the vLLM that this Python would import, whatever its distribution is called."""
    if util.find_spec("vllm") is None:
        return None
    name = _distribution()
    return "unknown" if name is None else metadata.version(name)


def installed_build() -> str:
    """The same with the distribution's name, which tells a build for CPUs from the others."""
    return f"{_distribution() or 'vllm'} {installed_version()}"


def program() -> list[str]:
    """vLLM's program beside this Python; or its module, for a wheel of another name with a detour."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "kvshare.cli.vllm_cpu"]
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _distribution() -> str | None:
    """vllm, vllm-cpu, vllm-rocm, ..."""
    return next(iter(metadata.packages_distributions().get("vllm", ())), None)
