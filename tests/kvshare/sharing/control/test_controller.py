"""The controller on a simulated server: it reduces what harms, brings it back, and leaves alone what pays."""

from __future__ import annotations

import logging

import pytest

from kvshare.reasons import Reason
from kvshare.settings import ControlSettings
from kvshare.sharing.control import Controller, Rung
from tests.kvshare.sharing.control.simulated_server import CHOSEN, Machine, SimulatedServer

OFTEN = CHOSEN.model_copy(update={"unshared_share": 0.2})  # so that tests are short


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_clients", [1, 8])
def test_sharing_that_pays_is_never_reduced(seed: int, num_clients: int) -> None:
    """Thousands of requests, of which few are served unshared: five times the chosen share at most."""
    server = SimulatedServer(Machine(), seed=seed, num_clients=num_clients)
    server.run(6000)
    assert set(server.rungs.values()) == {Rung.EVERYTHING}
    unshared = server.served[Reason.EXPERIMENT]
    assert 0 < unshared < 0.1 * 6000
    assert server.served.total() == server.served[None] + unshared


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_sharing_that_changes_nothing_is_not_reduced(seed: int, drift: float) -> None:
    """Unrelated prompts, saved at no cost; also where the whole server becomes slower all the time."""
    server = SimulatedServer(Machine(families=0, drift=drift, noise=0.5), seed=seed)
    server.run(6000)
    assert set(server.rungs.values()) == {Rung.EVERYTHING}


@pytest.mark.parametrize("harm", [0.15, 0.4])
def test_saves_that_slow_everything_down_are_found_and_stopped(
    harm: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests slow those next to them, so none alone would show it. Only the saves are stopped."""
    server = SimulatedServer(Machine(families=0, save_harm=harm))
    with caplog.at_level(logging.INFO):
        assert server.run(20_000, until=Rung.WANTED_SAVES) < 12_000
        line = caplog.messages[-1]
        assert line.startswith("sharing is reduced with 8-15 requests in flight: it made them ")
        before = server.num_stored
        server.run(6000)
    in_trials = server.controller.status().num_requests["trial"]
    assert server.num_stored - before <= in_trials + 30  # few seem to resemble one that came before
    assert server.rungs["8-15"] == Rung.WANTED_SAVES


def test_loads_that_do_not_pay_are_reduced_by_size_and_return() -> None:
    """First short prompts are shared no more, then all; once copies are fast, everything returns."""
    server = SimulatedServer(Machine(load_factor=2.5), settings=OFTEN)
    for rung in (Rung.WANTED_SAVES, Rung.DOUBLE, Rung.FOURFOLD, Rung.EIGHTFOLD):
        assert server.run(20_000, until=rung) < 20_000, rung
    server.machine.load_factor = 0.2
    for rung in (Rung.FOURFOLD, Rung.DOUBLE, Rung.WANTED_SAVES):
        assert server.run(60_000, until=rung) < 60_000, rung
    server.run(20_000)
    assert server.controller.status().changes["reduced"] == 4


def test_the_last_rung_shares_nothing_but_the_trials() -> None:
    """Even where the longest prompts are copied too slowly; and from there, too, sharing returns."""
    server = SimulatedServer(Machine(load_factor=2.5), settings=OFTEN, lengths=(4096, 8192))
    assert server.run(60_000, until=Rung.NOTHING) < 60_000
    before = dict(server.served)
    server.run(4000)
    shared = server.served[None] - before[None]
    assert shared < 0.25 * 4000
    assert server.served[Reason.EXPERIMENT] == before[Reason.EXPERIMENT]
    server.machine.load_factor = 0.2
    assert server.run(60_000, until=Rung.EIGHTFOLD) < 60_000


def test_a_load_that_pays_is_not_reduced_with_another_one() -> None:
    """Each load has its own rung."""
    server = SimulatedServer(Machine(families=0, save_harm=0.5, harmful_from=5), settings=OFTEN)
    assert server.run(20_000, until=Rung.WANTED_SAVES) < 20_000
    server.num_clients = 2
    server.run(3000)
    assert server.rungs["8-15"] == Rung.WANTED_SAVES
    assert server.rungs["2-3"] == Rung.EVERYTHING


def test_trials_that_lose_become_rare() -> None:
    """The harm of what was reduced is not tried again and again."""
    server = SimulatedServer(Machine(families=0, save_harm=0.5), settings=OFTEN)
    server.run(20_000, until=Rung.WANTED_SAVES)
    shares = []
    for _ in range(3):
        before = server.controller.status().num_requests["trial"]
        server.run(6000)
        shares.append((server.controller.status().num_requests["trial"] - before) / 6000)
    assert 0 < shares[0] < 0.25
    assert shares[2] < shares[0]
    assert server.controller.status().changes == {"reduced": 1, "returned": 0}


def settings_with(**changes: float) -> ControlSettings:
    return CHOSEN.model_copy(update=changes)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        (settings_with(unshared_share=1.0), {Reason.EXPERIMENT}),
        (settings_with(unshared_share=0.0), {None}),
        (settings_with(unshared_share=1.0, first_requests=10**6), {None}),
    ],
)
def test_the_share_is_what_was_chosen(settings: ControlSettings, reasons: set[Reason | None]) -> None:
    """1: all; 0: none; and none of a server's first requests."""
    server = SimulatedServer(Machine(families=0, save_harm=0.5), settings=settings)
    server.run(3000)
    assert set(server.served) == reasons
    assert set(server.rungs.values()) == {Rung.EVERYTHING}


def test_a_block_of_an_idle_server_begins_with_a_request() -> None:
    """One request an hour: each is a block, and about the share of them that was chosen is unshared."""
    now = 0.0
    controller = Controller(
        settings_with(unshared_share=0.2),
        full_s=lambda _: 1.0,
        break_even=lambda: 0,
        clock=lambda: now,
    )
    refused = 0
    for _ in range(500):
        with controller.take(1000, 1) as treatment:
            refused += treatment.refusal is Reason.EXPERIMENT
            now += 1.0
            treatment.complete(5)
        now += 3600.0
    assert 60 < refused < 180


def test_a_request_that_failed_says_nothing() -> None:
    """It is counted as served, and measures nothing; its error is the caller's."""
    now = 0.0
    controller = Controller(
        settings_with(unshared_share=0.5), full_s=lambda _: 1.0, break_even=lambda: 0, clock=lambda: now
    )
    for _ in range(100):
        now += 100.0
        with pytest.raises(OSError, match="gone"), controller.take(1000, 1):
            raise OSError("gone")
    status = controller.status()
    assert sum(status.num_requests.values()) == 100
    assert [(load.num_blocks_more, load.num_blocks_less, load.slower) for load in status.loads] == [
        (0, 0, None)
    ]
