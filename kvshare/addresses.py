"""
Addresses of this machine: whether one can be listened on, and whether a URL leads to a server's own one.

A port is tried before a model is loaded. If another process takes it in between, listening fails later.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from kvshare.errors import EngineError

SERVER_NAME = "kvshare"  # in the header Server of every answer of `kvshare serve`
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a connection to "any address" goes


def try_port(host: str, port: int) -> None:
    """
    Raises OSError where `host:port` cannot be listened on. 0, any free port, always can.

    With SO_REUSEADDR, as servers listen: connections that are closing do not count, a listening server does.
    """
    if not port:
        return
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # as servers do, for IPv4 may have a listener of its own
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def check_port(host: str, port: int, *, setting: str, remedy: str) -> None:
    """Raises EngineError, which names the setting of the port and what to do, where it cannot be used."""
    try:
        try_port(host, port)
    except OSError as exc:
        problem = exc.strerror or str(exc)
        raise EngineError(
            f"{setting}: cannot listen on {joined(host, port)}: {problem[:1].lower()}{problem[1:]}; {remedy}"
        ) from exc


def check_ports(host: str, port: int, admin_port: int | None) -> list[int]:
    """Return the main port and, if there is one, the admin port. EngineError if one cannot be listened on."""
    named = {"server.port (--port)": port, "server.admin_port": admin_port}
    ports = {setting: port for setting, port in named.items() if port is not None}
    for setting, each in ports.items():
        remedy = f"stop the server there, or set another {setting}; `kvshare doctor` says which server it is"
        check_port(host, each, setting=setting, remedy=remedy)
    return list(ports.values())


def is_own(url: str, host: str, ports: Iterable[int]) -> bool:
    """Return whether a URL leads to a server of this machine that listens on `host` and one of the ports."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if port not in ports or not parts.hostname:
        return False
    listens = set(_resolved(host))
    own = {_LOOPBACK.get(address, address) for address in listens}
    to = {_LOOPBACK.get(address, address) for address in _resolved(parts.hostname)}
    return bool(to & own) or (not listens.isdisjoint(_LOOPBACK) and any(map(_is_of_this_machine, to)))


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return _LOOPBACK.get(host, host)


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolved(host: str) -> Iterator[str]:
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    yield from (str(address[0]) for _, _, _, _, address in results)


def _is_of_this_machine(address: str) -> bool:
    """Only one's own address can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
