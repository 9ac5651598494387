"""Fixtures of the product's tests that the lab's tests use, too."""

from tests.conftest import however_busy, server

__all__ = ["however_busy", "server"]
