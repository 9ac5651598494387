"""A tiny model, and an empty tree in memory."""

import pytest

from delta_tree import DeltaTree
from kvshare.embedded.model import EmbeddedModel
from kvshare_lab.bench.random_models import tiny_model


@pytest.fixture(scope="module")
def model() -> EmbeddedModel:
    return EmbeddedModel(tiny_model("llama"), name="llama")


@pytest.fixture
def tree() -> DeltaTree:
    return DeltaTree.open(None, identity="test")
