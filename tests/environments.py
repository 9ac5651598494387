"""Environments of Python of their own, for what must not be in that of the tests."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The folder of programs of `.venv/NAME`, made and filled once for these requirements."""
    folder = Path(sys.prefix) / name
    programs, stamp = folder / "bin", folder / "installed"
    wanted = " ".join(requirements)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return programs
