"""For all benchmarks here."""

import pytest


@pytest.fixture(autouse=True)
def _however_busy(however_busy: None) -> None:
    """Their settings are those of `however_busy`."""
