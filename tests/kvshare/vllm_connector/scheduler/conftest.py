"""Requests that the tests of the scheduler side start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kvshare.vllm_connector.scheduler.ticketed_requests import admit, new_request, result

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.request_state import TicketedRequest


@pytest.fixture
def running() -> TicketedRequest:
    """A request whose first admission has placed copies at [0, 100) and [120, 300)."""
    request = new_request()
    admit(request, num_local=0)
    request.note_load(result())
    return request
