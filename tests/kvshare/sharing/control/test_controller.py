"""The controller on a simulated server: it reduces what harms, brings it back, and leaves alone what pays."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest

from kvshare.reasons import Reason
from kvshare.settings import ControlSettings
from kvshare.sharing.control import Controller, Rung, Treatment
from kvshare.sharing.control.blocks import Arm, TimeBlock
from kvshare.sharing.control.load_level import LoadLevel
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


class Blocks:
    """A controller whose blocks are drawn by the test; requests are in flight until they are ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.drawn = 0.99
        self.controller = Controller(
            settings_with(unshared_share=0.2),
            full_s=lambda _: 1.0,
            break_even=lambda: 0,
            clock=lambda: self.now,
            chance=lambda: self.drawn,
        )
        self.running: list[ExitStack] = []

    def take(self) -> Treatment:
        stack = ExitStack()
        treatment = stack.enter_context(self.controller.take(1000, len(self.running) + 1))
        self.running.append(stack)
        return treatment

    def end(self, number: int) -> None:
        for stack in self.running[:number]:
            stack.close()
        del self.running[:number]


@pytest.mark.parametrize("drawn", [0.0, 0.99])
def test_requests_count_once_most_in_flight_are_of_their_block(drawn: float) -> None:
    """In either arm: loads rise and fall within a block, so both are measured at the same part of it."""
    blocks = Blocks()
    for _ in range(4):
        blocks.take()
    blocks.now, blocks.drawn = 3.0, drawn
    counts = [blocks.take().counts for _ in range(6)]
    assert counts == [False] * 4 + [True] * 2
    blocks.end(4)
    assert blocks.take().counts


def test_a_block_that_cannot_keep_up_ends_early() -> None:
    """Requests pile up without sharing, where that is what makes the load bearable."""
    blocks = Blocks()
    blocks.drawn = 0.0
    first = blocks.take()
    assert first.refusal is Reason.EXPERIMENT
    blocks.drawn = 0.99
    refused = [blocks.take().refusal is Reason.EXPERIMENT for _ in range(10)]
    assert refused == [True] * 5 + [False] * 5


def test_a_block_is_as_long_as_its_requests_need() -> None:
    """Of requests that take ten seconds most of a block of two would have begun before it."""
    blocks = Blocks()
    for number in range(200):
        treatment = blocks.take()
        blocks.now = 10.0 * (number + 1)
        treatment.complete(10)
        blocks.end(1)
    blocks.drawn, blocks.now = 0.0, 3000.0
    assert blocks.take().refusal is Reason.EXPERIMENT
    blocks.drawn, blocks.now = 0.99, 3025.0
    assert blocks.take().refusal is Reason.EXPERIMENT
    blocks.now = 3035.0
    assert blocks.take().refusal is None


def test_a_trial_does_not_change_what_it_is_measured_with() -> None:
    """How long answers take is learned from usual blocks, and measures the blocks after them."""
    level = LoadLevel(1, share=0.02, confidence=0.99)
    for arm, token_s in ((Arm.USUAL, 0.1), (Arm.TRIAL, 0.1), (Arm.UNSHARED, 0.1)):
        block = TimeBlock(arm, Rung.EVERYTHING, 1, level.epoch, 0.0, 1, level.token_s)
        block.add(2.0 if arm is Arm.USUAL else 20.0, full_s=1.0, num_output=10, counts=True)
        level.fold(block, 0.0)
        assert level.token_s == pytest.approx(token_s)
