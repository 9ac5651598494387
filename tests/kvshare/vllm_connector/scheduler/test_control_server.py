"""The control server over a real socket."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from delta_tree import SegmentId

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.control_server import ControlServer


class Serve(Protocol):
    def __call__(self, token: str | None = None, host: str = "127.0.0.1") -> ControlServer: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(token=...)`: a running server over a small segment index and event log."""
    from kvshare.vllm_connector.scheduler.control_server import ControlServer
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
    from kvshare.vllm_protocol.messages import Dropped
    from kvshare.vllm_protocol.replica_info import ReplicaInfo

    servers: list[ControlServer] = []

    def begin(token: str | None = None, host: str = "127.0.0.1") -> ControlServer:
        events, segments = EventLog(), SegmentIndex(1000)
        for number in (1, 2):
            segments.add(SegmentId(number), HeldSegment("a", 10, 100))
        events.append(Dropped((SegmentId(9),)))
        info = ReplicaInfo(
            epoch=events.epoch,
            model="tiny",
            versions={},
            refusals=(),
            warnings=(),
            can_move_keys=True,
            namespace_fields={},
            bytes_per_token=1,
            max_bytes=1000,
            num_bytes=200,
            num_segments=2,
            max_model_len=64,
        )
        scheduler = ConnectorScheduler(segments=segments, events=events)
        servers.append(ControlServer(lambda: info, scheduler, host=host, port=0, token=token))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def call(server: ControlServer, path: str, body: object = None, token: str | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.load(exc)


@pytest.mark.parametrize(
    ("proxies", "num_warnings"),
    [
        (["a", "a", "b", "b"], 0),  # restarted
        (["a", "", "a", ""], 0),  # beside `kvshare doctor`
        (["a", "b", "a", "b", "a", "b"], 1),
        (["a", "b", "a", "b", "c", "c", "b"], 2),
    ],
)
def test_two_proxies_that_take_turns_are_logged(
    serve: Serve, proxies: list[str], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A vLLM belongs to one proxy: a second one would drop what the first has stored."""
    server = serve()
    with caplog.at_level("WARNING", logger="vllm.kvshare"):  # vLLM sets another one when it is imported
        for proxy in proxies:
            assert call(server, f"/journal?after=0&proxy={proxy}")[0] == 200
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_warnings


def test_routes_answer(serve: Serve) -> None:
    """info, journal, segments and drop speak the documents that the proxy reads."""
    from kvshare.vllm_protocol.messages import Dropped, Journal
    from kvshare.vllm_protocol.replica_info import ReplicaInfo

    server = serve()
    info = ReplicaInfo.from_json(call(server, "/info")[1])
    journal = Journal.from_json(call(server, "/journal?after=0")[1])
    assert info.epoch == journal.epoch
    assert journal.events == (Dropped((SegmentId(9),)),)
    segments = call(server, "/segments")[1]
    assert (segments["last"], segments["segment_ids"]) == (1, [1, 2])
    assert call(server, "/drop", {"segment_ids": [2, 3]}) == (200, {"num_dropped": 1})
    assert call(server, "/segments")[1]["segment_ids"] == [1]


def test_it_listens_on_an_ipv6_address(serve: Serve) -> None:
    """`--control-host` may be one."""
    with socket.create_connection(("::1", serve(host="::1").port)):
        pass


def test_the_token_opens_it(serve: Serve) -> None:
    """Without the right token nothing is answered, and nothing dropped."""
    server = serve(token="secret")
    for token in (None, "", "Secret", "secret2"):
        assert call(server, "/journal", token=token)[0] == 401
        assert call(server, "/drop", {"segment_ids": [1]}, token=token)[0] == 401
    assert call(server, "/segments", token="secret")[1]["segment_ids"] == [1, 2]


@pytest.mark.parametrize(
    "header", [("Host", "rebound.example"), ("Origin", "https://evil.example"), ("Sec-Fetch-Site", "none")]
)
def test_without_a_token_no_web_page_reads_or_drops(serve: Serve, header: tuple[str, str]) -> None:
    """Its browser is on this machine, and resolves any name of the page's to a loopback address."""
    server = serve()
    for path, data in (("/journal", None), ("/drop", b'{"segment_ids": [1]}')):
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, dict([header]))
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(request, timeout=60)
        refused.value.close()
    assert call(server, "/segments")[1]["segment_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/nothing", None, 404, "/info"),
        ("/drop", {"segment_ids": "1"}, 400, "segment_ids"),
        ("/drop", {"segment_ids": [True]}, 400, "segment_ids"),
        ("/drop", [], 400, "object"),
        ("/journal?after=x", None, 400, "after"),
        ("/journal?after=-1", None, 400, "after"),
        ("/journal?wait_s=nan", None, 400, "wait_s"),
    ],
)
def test_bad_requests_are_told_what_was_expected(
    serve: Serve, path: str, body: object, status: int, word: str
) -> None:
    got, document = call(serve(), path, body)
    assert got == status
    assert word in document["error"]
