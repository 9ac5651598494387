"""The running server that a command is for, where no store could answer instead."""

from __future__ import annotations

import os

from kvshare.cli.client import AdminClient
from kvshare.cli.options import checked_url


def server(url: str | None, key: str | None) -> AdminClient:
    """Return the server at --url or KVSHARE_URL. Raises a usage error if neither is given."""
    address = checked_url(url or os.environ.get("KVSHARE_URL"), "--url")
    return AdminClient(address, key=key or os.environ.get("KVSHARE_ADMIN_KEY"))
