"""Mode, limit and storage of a request: from its body, its Cache-Control and the settings."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from kvshare.errors import RequestError
from kvshare.requests import SharingMode
from proxy.app import build_app
from proxy.auth import LOCAL
from proxy.request_body import RequestOptions, parse_kvshare, request_options
from proxy.request_record import RECORD, AdmissionRecord, RequestRecord
from tests.proxy.conftest import settings_with
from tests.proxy.fake_engine import FakeEngine

OFF, EXACT, APPROX = SharingMode.OFF, SharingMode.EXACT, SharingMode.APPROX


@pytest.mark.parametrize(
    ("body", "cache_control", "expected"),
    [
        ({}, "", RequestOptions(EXACT, True)),
        ({"kvshare": None}, "max-age=0", RequestOptions(EXACT, True)),
        ({"kvshare": {"mode": "approx", "no_store": True}}, "", RequestOptions(APPROX, False)),
        ({"kvshare": {"mode": "approx"}}, "No-Cache", RequestOptions(OFF, True)),
        ({"kvshare": {"no_store": False}}, "max-age=0, no-store", RequestOptions(EXACT, False)),
        ({"kvshare": {"max_deviation": 0.01}}, "", RequestOptions(EXACT, True, 0.01)),
        ({"kvshare": {"max_deviation": 0}}, "no-cache", RequestOptions(OFF, True, 0)),
        ({"kvshare": {"max_deviation": None}}, "", RequestOptions(EXACT, True)),
    ],
)
def test_the_stricter_of_body_and_header_wins(
    body: dict[str, object], cache_control: str, expected: RequestOptions
) -> None:
    """What neither says is the settings' mode, and may be stored."""
    app = build_app(settings_with(sharing__mode="exact"), FakeEngine())
    headers = {"Cache-Control": cache_control} if cache_control else {}
    request = make_mocked_request("POST", "/v1/chat/completions", headers, app=app)
    request[RECORD] = RequestRecord("id", "id", admission=AdmissionRecord(LOCAL))
    assert request_options(request, parse_kvshare(body)) == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"mode": "most"}, "kvshare.mode"),
        ({"no_store": 1}, "kvshare.no_store"),
        ({"modes": "off"}, "kvshare.modes"),
        ({"max_deviation": -0.01}, "kvshare.max_deviation"),
        ({"max_deviation": float("inf")}, "kvshare.max_deviation"),
        ({"max_deviation": float("nan")}, "kvshare.max_deviation"),
        ({"max_deviation": "0.01"}, "kvshare.max_deviation"),
        ({"max_deviation": True}, "kvshare.max_deviation"),
        ({"max_deviation": 10**400}, "kvshare.max_deviation"),
        ({str(number): 0 for number in range(100)}, "kvshare"),
        ([], "kvshare"),
    ],
)
def test_wrong_options_are_refused_by_name(given: object, param: str) -> None:
    """Of a relayed body too, whose other members are not the proxy's to check."""
    with pytest.raises(RequestError) as caught:
        parse_kvshare({"temperature": "hot", "kvshare": given})
    assert caught.value.param == param
