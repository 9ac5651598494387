"""
`python -m kvshare_lab.vllm.slow_disk ARGUMENTS`: kvshare's command line, on a disk on which each write of the
metadata takes so many seconds more.

Only a benchmark's proxy is started like this (`servers.proxy`). It replaces a method of the store, which has
no hook for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from delta_tree.storage import Storage
from kvshare.cli.main import main
from kvshare_lab.vllm.servers import DISK_VARIABLE


def _slow(write: Callable[..., None], seconds: float) -> Callable[..., None]:
    def write_slowly(*given: Any) -> None:
        time.sleep(seconds)
        write(*given)

    return write_slowly


if __name__ == "__main__":
    Storage.write = _slow(Storage.write, float(os.environ[DISK_VARIABLE]))  # type: ignore[method-assign]  # on purpose
    main()
