"""Streams and events that stand in for a GPU's: they note what they were asked for, and when it is done."""

from __future__ import annotations

from typing import ClassVar


class FakeStream:
    """`done`: what it was asked for, in order. `at_ms`: when it will be past all of it."""

    def __init__(self, _: object = None) -> None:
        self.name, self.cuda_stream = "vllm", 1
        self.done: list[str] = []
        self.at_ms = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        self.done.append(f"after {event.name}")
        self.at_ms = max(self.at_ms, event.at_ms)


class FakeEvent:
    name = "a mark that was never set"
    now_ms: ClassVar = [0.0]  # of the host: what the GPU has reached

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        self.name, self.at_ms = f"{stream.name} {len(stream.done)}", stream.at_ms

    def query(self) -> bool:
        return self.at_ms <= self.now_ms[0]

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms
