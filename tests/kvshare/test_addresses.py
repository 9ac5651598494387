"""Which addresses can be listened on, and which URLs lead to a server's own one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvshare.addresses import check_port, is_own, try_port
from kvshare.errors import EngineError

HOSTS = ["127.0.0.1", "0.0.0.0"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("host", [*HOSTS, "localhost"])
def test_a_port_that_somebody_listens_on_is_taken(host: str, taken: int) -> None:
    """Also where it would be listened on at all addresses; the message names the setting and what to do."""
    with pytest.raises(EngineError, match=rf"^--here: cannot listen on {host}:{taken}: .*in use; go$"):
        check_port(host, taken, setting="--here", remedy="go")


@pytest.mark.parametrize("host", [*HOSTS, "localhost"])
def test_a_port_whose_connections_are_closing_is_free(host: str) -> None:
    """As for a server that is restarted: what waits for the network does not count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first waits
            assert client.recv(1) == b""
    try_port(host, port)


def test_trying_a_port_leaves_it_free() -> None:
    """What is tried can be listened on afterwards; 0 is any free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    try_port("127.0.0.1", port)
    try_port("127.0.0.1", 0)
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(EngineError, match=r"--here: cannot listen on 192\.0\.2\.1:8000: cannot assign"):
        check_port("192.0.2.1", 8000, setting="--here", remedy="go")


@pytest.mark.parametrize(
    ("url", "host", "own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", True),
        ("http://localhost:8000", "127.0.0.1", True),
        ("http://127.0.0.1:8000/", "localhost", True),
        ("http://0.0.0.0:8000", "127.0.0.1", True),
        ("http://127.0.0.1:8000", "0.0.0.0", True),
        ("http://127.3.2.1:8000", "0.0.0.0", True),
        ("http://127.0.0.1:8001", "127.0.0.1", True),
        ("http://127.0.0.1", "127.0.0.1", False),
        ("http://127.0.0.1:8002", "127.0.0.1", False),
        ("http://127.3.2.1:8000", "127.0.0.1", False),
        ("http://192.0.2.1:8000", "0.0.0.0", False),
        ("http://nobody.invalid:8000", "0.0.0.0", False),
    ],
)
def test_a_url_leads_to_a_server_by_address_and_port(url: str, host: str, own: bool) -> None:
    """By whatever name; at all addresses every one of this machine's counts, another machine's does not."""
    assert is_own(url, host, (8000, 8001)) is own
