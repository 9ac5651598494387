"""`kvshare bench gpu` on a terminal: a column for each attention backend, and why something is not there."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvshare.cli.templates import Document

_COPIES = ("to_device_pinned", "to_device_pageable", "to_host_pinned", "to_host_pageable", "host_to_host")
_ARMS = ("quiet", "full", "saves", "loads")


def gpu(document: Document) -> list[RenderableType]:
    backends = document["backends"]
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("attention")
    for backend in backends:
        table.add_column(backend["backend"])
    for name, (part, say) in _ROWS.items():
        cells = ("-" if backend[part] is None else say(backend[part]) for backend in backends)
        table.add_row(Text(name, style="bold"), *map(Text, cells))
    reasons = (
        f"{backend['backend']}, no {part}: {why}"
        for backend in backends
        for part, why in backend["not_measured"].items()
    )
    verdict = "passed" if document["passed"] else "FAILED"
    return [_device(document), _copies(document), "", table, "", *map(Text, reasons), Text(verdict)]


def _device(document: Document) -> Text:
    environment = document["environment"]
    device = environment["device"]
    where = (
        environment["cpu"] if device is None else f"{device['name']}, {device['num_bytes'] / 2**30:.0f} GiB"
    )
    vllm = document["servers"]["vllm"]
    how = "eager" if vllm["enforce_eager"] else "compiled"
    return Text(f"{document['servers']['model']} ({vllm['dtype']}, {how}) on {where}, {environment['vllm']}")


def _copies(document: Document) -> Text:
    rates = document["copy_bytes_per_s"]
    said = (
        f"{name.replace('_', ' ')} {'-' if rates[name] is None else f'{rates[name] / 1e9:.1f}'}"
        for name in _COPIES
    )
    return Text(f"copies, GB/s: {', '.join(said)}")


def _self_test(part: Document) -> str:
    return f"shares, {part['attention_backend']}" if part["passed"] else "; ".join(part["refusals"])


def _parity(part: Document) -> str:
    return f"{part['max_abs_logprob_error']:.2g} (batching alone: {part['noise']:.2g})"


def _break_even(part: Document) -> str:
    measured, learned = (
        "none" if part[name] is None else f"{part[name]:,} tokens"
        for name in ("measured_tokens", "learned_tokens")
    )
    return f"{measured} (by the measured rates: {learned})"


def _speedup(part: Document) -> str:
    last = part["lengths"][-1]
    return f"{last['speedup']:.2f} at {last['tokens']:,} tokens, {last['reused']:.0%} reused"


def _tokens(figure: str) -> Callable[[Document], str]:
    return lambda part: ", ".join(f"{name} {part['arms'][name][figure]:.1f}" for name in _ARMS)


def _soak(part: Document) -> str:
    return f"{part['wrong_outputs']} wrong, {sum(part['failed'].values())} failed of {part['requests']:,}"


def _syncs(part: Document) -> str:
    return f"{part['per_step']:.2f}, of these ours {part['ours_per_step']:.2f}"


_ROWS: dict[str, tuple[str, Callable[[Document], str]]] = {
    "self-test": ("self_test", _self_test),
    "largest error, log-probability": ("parity", _parity),
    "sharing pays from": ("break_even", _break_even),
    "speedup of the first token": ("break_even", _speedup),
    "between tokens, mean ms": ("inter_token", _tokens("mean_ms")),
    "between tokens, p99 ms": ("inter_token", _tokens("p99_ms")),
    "between tokens, longest ms": ("inter_token", _tokens("max_ms")),
    "soak": ("soak", _soak),
    "host waits per step": ("syncs", _syncs),
}
"""The part of a backend's report that a row shows, and how."""
