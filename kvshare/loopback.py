"""Whether an address can be reached from this machine only: what needs no secret."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether it is 127.0.0.0/8, ::1, with a zone or not, or `localhost`. Other names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
