"""`kvshare serve` takes as many open files as the system gives, and warns where these are few."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import logging, resource, sys
from kvshare.cli.open_files import raise_open_files
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "warns"), [(256, 4096, False), (256, 512, True), (512, 512, True), (4096, 4096, False)]
)
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int, warns: bool) -> None:
    """In a process of its own, as a hard limit cannot be raised again."""
    command = [sys.executable, "-c", _SCRIPT, str(soft), str(hard)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(hard)] * 3
    assert (f"at most {hard} files" in ended.stderr) == warns
