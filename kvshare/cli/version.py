"""`kvshare version`: what is installed."""

from __future__ import annotations

import platform

from kvshare import __version__
from kvshare.cli.options import Format, OutputFormat
from kvshare.cli.output import show

_LIBRARIES = ("torch", "transformers", "qdrant-edge-py", "qdrant-client", "sentence-transformers")


def version(output_format: Format = OutputFormat.TERMINAL) -> None:
    """What is installed: KVShare, Python and the libraries that matter."""
    from kvshare.vllm_protocol.versions import installed_version

    libraries = {name: _installed(name) for name in _LIBRARIES} | {"vllm": installed_version()}
    document = {
        "kvshare": __version__,
        "python": platform.python_version(),
        "libraries": libraries,
    }
    show("version", document, output_format)


def _installed(name: str) -> str | None:
    from importlib import metadata  # a third of the time that --help takes

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
