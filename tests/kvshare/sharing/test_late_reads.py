"""A disk that becomes slow is believed after two late reads, and tried again after a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvshare.sharing.cost import CostModel
from kvshare.sharing.late_reads import LateReads
from kvshare.sharing.rates import DISK, MEMORY, LoadRate, Rates

SIZE, FAST_S, SLOW_S = 10_000_000, 0.02, 2.0


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def fast_disk() -> Iterator[tuple[CostModel, _Clock]]:
    """Eight reads were fast."""
    rates = Rates.linear(1000.0, 1e9, bytes_per_token=1000)
    cost, clock = CostModel(rates), _Clock()
    cost.know_disk()
    cost._late_reads = LateReads(clock=clock)
    for _ in range(8):
        cost.observe_load(SIZE, FAST_S, place=DISK)
    yield cost, clock


def seconds(cost: CostModel) -> float:
    return cost.rates.loads[DISK].seconds(SIZE)


def test_two_late_reads_are_believed() -> None:
    """One may be a hiccup; a read in time between them is."""
    with fast_disk() as (cost, _):
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        assert seconds(cost) < 2 * FAST_S
        cost.observe_load(SIZE, FAST_S, place=DISK)
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        assert seconds(cost) < 2 * FAST_S
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        assert seconds(cost) > SLOW_S / 2


def test_it_is_tried_again() -> None:
    """As fast as it was, once: one late read more is enough; one in time, and it is believed."""
    with fast_disk() as (cost, clock):
        for _ in range(2):
            cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        clock.now = 29
        cost.try_disk_again()
        assert seconds(cost) > SLOW_S / 2
        clock.now = 31
        cost.try_disk_again()
        assert seconds(cost) < 2 * FAST_S
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        assert seconds(cost) > SLOW_S / 2
        clock.now = 62
        cost.try_disk_again()
        cost.observe_load(SIZE, FAST_S, place=DISK)
        clock.now = 100
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        assert seconds(cost) < 2 * FAST_S


def test_what_does_not_learn_is_left_alone() -> None:
    rates = Rates.linear(1000.0, 1e9, bytes_per_token=1000)
    cost = CostModel(rates, learns=False)
    cost.know_disk()
    before = cost.rates.loads[DISK]
    for _ in range(3):
        cost.observe_load(SIZE, SLOW_S, place=DISK, is_late=True)
        cost.try_disk_again()
    assert cost.rates.loads == {MEMORY: LoadRate(before.fixed_s, before.byte_s), DISK: before}
