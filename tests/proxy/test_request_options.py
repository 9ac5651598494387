"""Mode and storage of a request: from its body, its Cache-Control and the settings."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from kvshare.errors import RequestError
from kvshare.requests import SharingMode
from proxy.app import build_app
from proxy.request_body import parse_kvshare, request_options
from tests.proxy.conftest import settings_with
from tests.proxy.fake_engine import FakeEngine

OFF, EXACT, APPROX = SharingMode.OFF, SharingMode.EXACT, SharingMode.APPROX


@pytest.mark.parametrize(
    ("body", "cache_control", "expected"),
    [
        ({}, "", (EXACT, True)),
        ({"kvshare": None}, "max-age=0", (EXACT, True)),
        ({"kvshare": {"mode": "approx", "no_store": True}}, "", (APPROX, False)),
        ({"kvshare": {"mode": "approx"}}, "No-Cache", (OFF, True)),
        ({"kvshare": {"no_store": False}}, "max-age=0, no-store", (EXACT, False)),
    ],
)
def test_the_stricter_of_body_and_header_wins(
    body: dict[str, object], cache_control: str, expected: tuple[SharingMode, bool]
) -> None:
    """What neither says is the settings' mode, and may be stored."""
    app = build_app(settings_with(sharing__mode="exact"), FakeEngine())
    headers = {"Cache-Control": cache_control} if cache_control else {}
    request = make_mocked_request("POST", "/v1/chat/completions", headers, app=app)
    assert request_options(request, parse_kvshare(body)) == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"mode": "most"}, "kvshare.mode"),
        ({"no_store": 1}, "kvshare.no_store"),
        ({"modes": "off"}, "kvshare.modes"),
        ({str(number): 0 for number in range(100)}, "kvshare"),
        ([], "kvshare"),
    ],
)
def test_wrong_options_are_refused_by_name(given: object, param: str) -> None:
    """Of a relayed body too, whose other members are not the proxy's to check."""
    with pytest.raises(RequestError) as caught:
        parse_kvshare({"temperature": "hot", "kvshare": given})
    assert caught.value.param == param
