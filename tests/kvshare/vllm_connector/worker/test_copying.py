"""Whose batch is next: who is due first, of those that have room; whatever fails, the others go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.copying import CopyQueue, Job

GB = 10**9
MESSAGE = "unspecified launch failure"


class Batches:
    """Work of some batches, which notes their order."""

    is_past = True

    def __init__(self, name: str, order: list[str], count: int = 1, *, has_room: bool = True) -> None:
        self.name, self.order, self.count, self.has_room = name, order, count, has_room

    def batches(self) -> Iterator[None]:
        for number in range(self.count):
            if number:
                yield
            self.order.append(self.name)

    def wait_until_read(self) -> None:
        raise AssertionError("everything is read when it is done")

    def finish(self) -> Mapping[str, float]:
        return {"write": 1.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    from kvshare.vllm_connector.worker import copying

    now = [100.0]
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(queue: CopyQueue) -> None:
    while queue.advance() is not None:
        pass


def submit(queue: CopyQueue, work: Batches, gigabytes: float = 0.0, *, is_save: bool = False) -> Job:
    return queue.submit(work.name, work, num_bytes=int(gigabytes * GB), is_save=is_save)


def new_queue() -> CopyQueue:
    from kvshare.vllm_connector.worker.copying import CopyQueue

    return CopyQueue()


def test_loads_go_before_saves_and_short_ones_before_long_ones(clock: list[float]) -> None:
    """Between two batches of a long load a short one may begin."""
    queue, order = new_queue(), list[str]()
    submit(queue, Batches("save", order), 1, is_save=True)
    submit(queue, Batches("long", order, 3), 4)
    queue.advance()
    clock[0] += 0.1
    submit(queue, Batches("short", order), 0.1)
    run(queue)
    assert order == ["long", "short", "long", "long", "save"]


def test_nobody_waits_for_ever(clock: list[float]) -> None:
    """However many short loads come, a long one is due at last, and then a save."""
    queue, order = new_queue(), list[str]()
    submit(queue, Batches("long", order), 4)
    submit(queue, Batches("save", order), 1, is_save=True)
    for _ in range(30):
        clock[0] += 0.05
        submit(queue, Batches("short", order), 0.1)
        queue.advance()
    assert 5 < order.index("long") < 12
    assert order.index("long") < order.index("save") < 28


def test_what_somebody_waits_for_goes_first(clock: list[float]) -> None:
    """A save of a request that loses its blocks."""
    queue, order = new_queue(), list[str]()
    submit(queue, Batches("load", order, 2), 1)
    queue.advance()
    queue.hurry(submit(queue, Batches("save", order, 2), 5, is_save=True))
    run(queue)
    assert order == ["load", "save", "save", "load"]


def test_what_has_no_room_is_passed_over(clock: list[float]) -> None:
    """Loads and saves have buffers of their own: neither waits for the other's."""
    queue, order = new_queue(), list[str]()
    full = Batches("load", order, has_room=False)
    submit(queue, full)
    submit(queue, Batches("save", order), is_save=True)
    run(queue)
    assert order == ["save"]
    full.has_room = True
    run(queue)
    assert order == ["save", "load"]
    assert not len(queue)


@pytest.mark.parametrize("part", ["has_room", "batches", "is_past", "finish"])
def test_an_error_fails_one_job_only(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is raised; it is logged without its message, which might have parts of a prompt."""

    message = "secret"

    def fail(_: Batches) -> None:
        raise RuntimeError(message)

    own = fail if part in ("batches", "finish") else property(fail, lambda *_: None)
    queue, order = new_queue(), list[str]()
    bad = submit(queue, type("Failing", (Batches,), {part: own})("bad", order))
    good = submit(queue, Batches("good", order))
    run(queue)
    assert (bad.is_done, bad.failed, bad.seconds) == (True, True, {})
    assert (good.is_done, good.failed, good.seconds) == (True, False, {"write": 1.0})
    assert "bad failed: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_thread_makes_what_comes_until_it_is_closed() -> None:
    """Jobs that are there when it is closed are made."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    thread, order = CopyThread(), list[str]()
    jobs = [submit(thread, Batches(f"load {number}", order, 3)) for number in range(20)]
    thread.wait(jobs[0])
    thread.wait_until_read(jobs[1])
    thread.close()
    assert all(job.is_done for job in jobs)
    assert len(order) == 60


def test_a_wait_ends_in_time() -> None:
    """Also while there is no room."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    thread = CopyThread()
    work = Batches("load", [], has_room=False)
    job = submit(thread, work)
    thread.wait(job, 0.01)
    assert not job.is_done
    work.has_room = True
    thread.wait(job)
    thread.close()


class Gone(Batches):
    """Work on a device that does not answer."""

    @property
    def has_room(self) -> bool:
        raise RuntimeError(MESSAGE)

    @has_room.setter
    def has_room(self, _: bool) -> None:
        """Not asked for."""


def test_no_job_stays_when_a_device_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's thread waits for all of them; what comes later is made if it can be."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    thread = CopyThread()
    lost = submit(thread, Gone("load", []))
    thread.wait(lost)
    made = submit(thread, Batches("save", []))
    thread.wait(made)
    thread.close()
    assert (lost.failed, made.failed) == (True, False)
    assert "load failed" in caplog.text
    assert MESSAGE not in caplog.text


def test_the_thread_enters_its_device_first() -> None:
    """Before any work is asked for, once."""
    from kvshare.vllm_connector.worker.copying import CopyThread

    order = list[str]()
    thread = CopyThread(lambda: order.append("enter"))
    for name in ("one", "two"):
        thread.wait(submit(thread, Batches(name, order)))
    thread.close()
    assert order == ["enter", "one", "two"]
