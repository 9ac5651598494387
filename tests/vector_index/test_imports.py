"""Importing the package costs little; what is heavy comes when it is named."""

import subprocess
import sys

import pytest

import vector_index

HEAVY = ["torch", "sentence_transformers", "qdrant_client", "qdrant_edge", "transformers"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    """`kvshare --help` must not wait for torch or Qdrant."""
    program = f"import sys, vector_index; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_heavy_name_exists() -> None:
    """Each name that is imported when it is first used resolves."""
    for name in vector_index._HEAVY:
        assert getattr(vector_index, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Lazy importing does not swallow typing errors."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = vector_index.Nothing
