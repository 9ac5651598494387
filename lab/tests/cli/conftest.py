"""The command line, as the product's tests run it."""

from tests.kvshare.cli.conftest import cli

__all__ = ["cli"]
