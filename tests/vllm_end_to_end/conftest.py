"""One fleet for all tests of this folder; the test that loses a replica is the last."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm_end_to_end.fleet import Fleet, running_fleet

FOLDER = Path(__file__).parent


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.parent == FOLDER]
    ordered = sorted((items[place] for place in places), key=lambda item: "lost_replica" in item.name)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is for Linux"))
