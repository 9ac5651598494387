"""Fixtures of the product's tests that the lab's tests use, too."""

from tests.conftest import compilers_may_start_late, however_busy, server

__all__ = ["compilers_may_start_late", "however_busy", "server"]
