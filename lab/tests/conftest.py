"""Fixtures of the product's tests that the lab's tests use, too."""

from tests.conftest import server

__all__ = ["server"]
