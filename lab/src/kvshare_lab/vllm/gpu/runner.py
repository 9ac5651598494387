"""Starts the servers of `kvshare bench gpu` once for each backend, and measures the parts in their order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from kvshare.cli.output import note
from kvshare.errors import ConfigError, KVShareError
from kvshare.replay.whole_files import write_whole
from kvshare_lab.bench.bound import copy_rates
from kvshare_lab.checkout import checkout_commit
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.gpu import answers, inter_token, load, profile, ttft
from kvshare_lab.vllm.gpu.config import PARTS, Config
from kvshare_lab.vllm.gpu.pieces import piece_rates
from kvshare_lab.vllm.gpu.report import Deadline, Figures, Progress, Report
from kvshare_lab.vllm.stack import Stack, document, pair, stack
from kvshare_lab.vllm.termination import Terminated

_SELF_TEST, _SYNCS = "self_test", "syncs"
_TIME_IS_OVER = "the time was over before its servers were ready"
_RESTART_SHARE = 0.7  # of the time of the first start that a second one takes at least, with files in memory


class _Part(NamedTuple):
    """
    `least_s`: with less time left it is not begun. `weight`: how much of the time that is left it may take,
    next to the later parts. `needs_proxy`: its requests go through the proxy.
    """

    measure: Callable[[Stack, Config, Progress], Awaitable[Figures]]
    least_s: float
    weight: float
    needs_proxy: bool = True


_PARTS = {
    _SELF_TEST: _Part(answers.self_test, 0, 1, needs_proxy=False),
    "parity": _Part(answers.parity, 10, 1, needs_proxy=False),
    "ttft": _Part(ttft.ttft, 10, 3),
    "load": _Part(load.load, 15, 3),
    "inter_token": _Part(inter_token.inter_token, 15, 2),
    "soak": _Part(answers.soak, 10, 1),
    "profile": _Part(profile.profile, 10, 1),
    _SYNCS: _Part(inter_token.syncs, 20, 2),
}
assert tuple(_PARTS) == PARTS


def run(config: Config) -> Figures:
    """
    `passed`: every backend started, shares, and gave no wrong answer. `finished`: the run came to its end.

    The time of the run counts from here.
    Raises:  ConfigError for an option that is wrong
    """
    deadline, config = Deadline(config.seconds), config.fitted()
    whole = _Whole(config, deadline, _head(config))
    whole.write()
    try:
        whole.copies, whole.pieces = copy_rates(), piece_rates()
        note(f"copies: {json.dumps(whole.copies)}, of pieces: {json.dumps(whole.pieces)}")
        for backend in config.backend_names:
            whole.measure(backend)
        whole.finished = True
    except (KeyboardInterrupt, Terminated) as exc:
        whole.ended_by = type(exc).__name__
    whole.write()
    return whole.to_json()


@dataclass(slots=True)
class _Whole:
    """The document, as far as it goes."""

    config: Config
    deadline: Deadline
    head: Figures
    copies: Figures | None = None
    pieces: Figures | None = None
    reports: list[Report] = field(default_factory=list)
    finished: bool = False
    ended_by: str | None = None

    def measure(self, backend: str | None) -> None:
        """All parts with one backend."""
        report = Report(backend or "default", self.config.part_names, self.deadline, self.write)
        self.reports.append(report)
        try:
            start_s = self._with_servers(backend, report)
            if _SYNCS in report.parts:
                self._count_syncs(backend, report, start_s)
        except KVShareError as exc:  # the servers of several parts
            unmeasured = [name for name in report.parts if report.found.get(name) is None]
            if _shares(report) and not self.deadline.left_s:
                report.not_measured = dict.fromkeys(unmeasured, _TIME_IS_OVER) | report.not_measured
            else:
                report.fail(unmeasured, str(exc))

    def _with_servers(self, backend: str | None, report: Report) -> float:
        """All parts but `syncs`; the seconds until both vLLMs were ready."""
        began = time.monotonic()
        with pair(self.config.for_backend(backend), start_s=self.deadline.left_s) as both:
            start_s = time.monotonic() - began
            note(f"{report.backend}: both vLLMs are ready after {start_s:.0f} s")
            report.seconds["start"] = start_s
            asyncio.run(measure(both, self.config, report, needs_proxy=False))
            if _shares(report):
                with servers.running([both.proxy], start_s=self.deadline.left_s):
                    asyncio.run(measure(both, self.config, report, needs_proxy=True))
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                report.device_bytes = total - free
        return start_s

    def _count_syncs(self, backend: str | None, report: Report, start_s: float) -> None:
        """Over servers that are started again with vLLM's check."""
        if not torch.cuda.is_available():
            report.skip(_SYNCS, "there is no CUDA device")
            return
        least_s = _RESTART_SHARE * start_s + _PARTS[_SYNCS].least_s
        if self.deadline.left_s < least_s:
            report.skip(_SYNCS, f"{self.deadline.left_s:.0f} s were left, expected {least_s:.0f} s")
        if _SYNCS in report.not_measured:
            return
        options = self.config.for_backend(backend, checks_syncs=True)
        with stack(options, start_s=self.deadline.left_s) as checked:
            asyncio.run(_add(checked, self.config, report, _SYNCS))

    def write(self) -> None:
        """The file, whole at any time. Raises ConfigError where it cannot be written."""
        out = self.config.out
        if out is None:
            return
        try:
            write_whole(out, (json.dumps(self.to_json(), indent=1) + "\n").encode())
        except OSError as exc:
            raise ConfigError("--out", f"{out} cannot be written: {exc.strerror}") from exc

    def to_json(self) -> Figures:
        found = [report.to_json() for report in self.reports]
        return {
            **self.head,
            "finished": self.finished,
            "ended_by": self.ended_by,
            "passed": self.ended_by is None and all(each["passed"] for each in found),
            "copy_bytes_per_s": self.copies,
            "piece_bytes_per_s": self.pieces,
            "backends": found,
        }


async def measure(both: Stack, config: Config, report: Report, *, needs_proxy: bool) -> None:
    """The parts that the proxy serves, or those before it is started, over vLLMs that run already."""
    for name in report.parts:
        if name != _SYNCS and _PARTS[name].needs_proxy is needs_proxy:
            await _add(both, config, report, name)
            if name == _SELF_TEST and not _shares(report):
                others = [part for part in report.parts if part != _SELF_TEST]
                report.fail(others, "the connector shares nothing, see self_test")
                return


async def _add(both: Stack, config: Config, report: Report, name: str) -> None:
    part = _PARTS[name]
    later = report.parts[report.parts.index(name) :]
    share = part.weight / sum(_PARTS[each].weight for each in later)
    await report.add(name, partial(part.measure, both, config), least_s=part.least_s, share=share)


def _shares(report: Report) -> bool:
    return bool((report.found.get(_SELF_TEST) or {}).get("passed"))


def _head(config: Config) -> Figures:
    head = document("gpu", config.options, config)
    del head["servers"]["vllm"]["attention_backend"]  # each backend has its own
    head["environment"]["device"] = _device()
    commit = checkout_commit()
    return head if commit is None else {**head, "commit": commit}


def _device() -> Figures | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "num_bytes": properties.total_memory, "count": torch.cuda.device_count()}
