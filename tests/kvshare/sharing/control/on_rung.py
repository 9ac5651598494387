"""A controller that is made to serve on a rung, for the engines that ask it."""

from __future__ import annotations

from kvshare.sharing.control import Controller, Rung


def put_on(controller: Controller, rung: Rung) -> None:
    """Requests that arrive alone from now on are served on this rung."""
    controller._level(1).rung = rung
    controller._block = None
