"""A tree with a family of prompts in one namespace, and a stranger in another."""

from collections.abc import Iterator

import pytest

from delta_tree import DeltaTree
from tests.kvshare.cli.family import IDENTITY, Family, grow


@pytest.fixture
def store() -> Iterator[DeltaTree]:
    with DeltaTree.open(None, identity=IDENTITY, clock=lambda: 1000.0) as opened:
        yield opened


@pytest.fixture
def family(store: DeltaTree) -> Family:
    return grow(store)
