"""This machine in words: the processor's model, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model", "cpu model")  # of x86, ARM boards, others


def processor() -> str:
    """Return the processor's model where the system says it, else its architecture."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    named = next((facts[name] for name in _NAMES if facts.get(name)), "")
    return " ".join(named.split()) or platform.processor() or platform.machine()


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
