"""How the document of a benchmark looks on a terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvshare.cli.views.parts import Columns, Document, Parts, cells, facts, of
from kvshare.cli.views.units import counted, number

_COPIES = ("to_device_pinned", "to_device_pageable", "to_host_pinned", "to_host_pageable", "host_to_host")


def bench(document: Document) -> Parts:
    if document["benchmark"] != "gpu":
        yield facts(dict(_flat(document)))
        return
    servers, environment = document["servers"], document["environment"]
    device = environment["device"]
    machine = f"{device['name']}, {device['num_bytes'] / 2**30:.0f} GiB" if device else environment["cpu"]
    compiled = "eager" if servers["vllm"]["enforce_eager"] else "compiled"
    yield f"{servers['model']} ({servers['vllm']['dtype']}, {compiled}) on {machine}, {environment['vllm']}"
    if rates := document["copy_bytes_per_s"]:
        copies = (f"{name.replace('_', ' ')} {_giga(rates[name])}" for name in _COPIES)
        yield f"copies, GB/s: {', '.join(copies)}"
    backends = document["backends"]
    yield from (facts(*(cells(backend, _GPU) for backend in backends)), "")
    for backend in backends:
        for part, why in backend["not_measured"].items():
            yield f"{backend['backend']}, no {part}: {why}"
    ended = "" if document["finished"] else f", not finished: {document['ended_by']}"
    yield ("passed" if document["passed"] else "FAILED") + ended


def _flat(document: Document, at: str = "") -> Iterator[tuple[str, str]]:
    """Nested keys as dotted paths."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, at=f"{at}{name}.")
        elif isinstance(value, Sequence) and value and all(isinstance(entry, Mapping) for entry in value):
            for index, entry in enumerate(value):
                yield from _flat(entry, at=f"{at}{name}.{index}.")
        else:
            yield f"{at}{name}", f"{value:.4g}" if isinstance(value, float) else str(value)


def _giga(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.1f}"


def _measured(part: str, shown: Callable[[Document], str]) -> Callable[[Document], str]:
    return lambda backend: shown(backend[part]) if backend[part] else "-"


def _self_test(test: Document) -> str:
    return f"shares, {test['attention_backend']}" if test["passed"] else "; ".join(test["refusals"])


def _error(parity: Document) -> str:
    return f"{parity['max_abs_logprob_error']:.2g} (batching alone: {parity['noise']:.2g})"


def _break_even(ttft: Document) -> str:
    measured, learned = (
        counted(ttft[name], "token") or "none" for name in ("measured_tokens", "learned_tokens")
    )
    return f"{measured} (by the measured rates: {learned})"


def _speedups(ttft: Document) -> str:
    lengths = []
    for row in ttft["lengths"]:
        changed = [f"{each['speedup']:.2f} ({each['share']:.0%} changed)" for each in row["changed"]]
        prefix = f"{row['prefix']['speedup']:.2f} (prefix cache)"
        lengths.append(f"{row['tokens']:,} tokens: {', '.join([*changed, prefix])}")
    return "; ".join(lengths)


def _throughput(load: Document) -> str:
    return ", ".join(
        f"{row['throughput_ratio']:.2f} ({row['near']:.0%} near-duplicates)" for row in load["closed_loop"]
    )


def _by_arm(name: str) -> Callable[[Document], str]:
    return lambda part: ", ".join(
        f"{arm} {number(figures[name], '.1f')}" for arm, figures in part["arms"].items()
    )


def _wrong(soak: Document) -> str:
    failed = sum(soak["failed"].values())
    return f"{soak['wrong_outputs']} wrong, {failed} failed of {soak['requests']:,}"


def _waits(syncs: Document) -> str:
    return f"{syncs['per_step']:.2f}, of these ours {syncs['ours_per_step']:.2f}"


_GPU: Columns = {
    "attention": of("backend"),
    "self-test": _measured("self_test", _self_test),
    "largest error, log-probability": _measured("parity", _error),
    "sharing pays from": _measured("ttft", _break_even),
    "speedup of the first token": _measured("ttft", _speedups),
    "requests a second, of stock vLLM's": _measured("load", _throughput),
    "between tokens, mean ms": _measured("inter_token", _by_arm("mean_ms")),
    "between tokens, p99 ms": _measured("inter_token", _by_arm("p99_ms")),
    "between tokens, longest ms": _measured("inter_token", _by_arm("max_ms")),
    "soak": _measured("soak", _wrong),
    "host waits per step": _measured("syncs", _waits),
}
"""By name: a figure of an attention backend."""
