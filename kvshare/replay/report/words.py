"""
The summary in plain words: what sharing saves on this log, beside what, and where it does not pay.

Sentences out, unescaped; every number in them stands in a table too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvshare.replay.report.reading import Report
from kvshare.replay.report.tables import counted, duration, percent, points, size
from kvshare.replay.results import ArmResults, ArmTimes, Figures, finite

_LITTLE, _MUCH = 0.02, 0.10  # of all prompt tokens: gains below are hardly worth it, above are worth a lot
_MIN_PART = 0.03  # of the tokens or requests: smaller groups are not spoken of
_GROUPS = {"length": "prompts of {} tokens", "turn": "{} turns", "language": "prompts in “{}”"}


def headline(report: Report) -> str:
    """One sentence."""
    kvshare, prefix = report.kvshare, report.find("prefix")
    if not report.data.num_requests:
        return "The log has no request that could be read."
    if kvshare is None:
        return "No arm of KVShare was replayed: below are the others."
    rate = percent(kvshare.token_hit_rate)
    if not kvshare.num_tokens:
        return "The log has no tokens."
    if prefix is None:
        return f"With KVShare, {rate} of this log's prompt tokens would not have been computed."
    gain = _gain(kvshare, prefix)
    alone = percent(prefix.token_hit_rate)
    beside = f"({rate} of the prompt tokens not computed, {alone} with prefixes alone)"
    if gain >= _MUCH:
        return f"Sharing pays here: {points(gain)} over prefix caching {beside}."
    if gain >= _LITTLE:
        return f"Sharing pays somewhat here: {points(gain)} over prefix caching {beside}."
    if gain > -_LITTLE:
        return f"There is little to share here beyond equal prefixes: {points(gain)} {beside}."
    return f"As configured, KVShare saves less here than prefix caching: {points(gain)} {beside}."


def sentences(report: Report) -> Iterator[str]:
    """What the headline does not say, most important first."""
    kvshare = report.kvshare
    if kvshare is None or not kvshare.num_requests:
        return
    yield _saved(report, kvshare)
    yield from _beside(report, kvshare)
    yield from _where_not(report, kvshare)
    yield from _store(kvshare)


def _saved(report: Report, kvshare: ArmResults) -> str:
    speed = finite(report.config.get("prefill_tokens_per_s"))
    at = "" if speed is None else f" at {counted(speed)} tokens/s of prefill"
    net = report.times.arms.get(kvshare.label, ArmTimes()).ttft_saved_net_s.mean
    own = "its own embedding, look-up and planning on this machine"
    less = "" if net is None else f", {duration(net)} after {own}"
    return (
        f"“{kvshare.label}” would have spared {counted(kvshare.num_hit_tokens)} of "
        f"{counted(kvshare.num_tokens)} prompt tokens: an estimated "
        f"{duration(kvshare.ttft_saved_s.mean)} of the time to the first token of a request{at}{less}. "
        f"{percent(kvshare.at_least[0])} of the requests need not compute half of their tokens or more, "
        f"{percent(kvshare.at_least[2])} nine tenths or more."
    )


def _beside(report: Report, kvshare: ArmResults) -> Iterator[str]:
    chunks, oracle, response = (report.find(name) for name in ("chunks", "oracle", "response"))
    rate = kvshare.token_hit_rate
    if chunks is not None:
        better = (chunks.token_hit_rate or 0) > (rate or 0)
        what = "which is more" if better else "which is not more"
        yield (
            f"Exact chunks anywhere, as LMCache's blend reuses them, come to "
            f"{percent(chunks.token_hit_rate)}, {what}; it has no gate for how faithful a copy is."
        )
    if oracle is not None and oracle.token_hit_rate:
        part = (rate or 0) / oracle.token_hit_rate
        yield (
            f"{percent(oracle.token_hit_rate)} of the tokens stood in an earlier prompt at all "
            f"(oracle): KVShare takes {percent(part)} of that."
        )
    opened = next((arm for arm in report.endless if arm.arm == f"{kvshare.arm}-open"), None)
    if opened is not None and _gain(opened, kvshare) > 0.005:
        yield (
            "With its gates for quality and cost open it would take "
            f"{percent(opened.token_hit_rate)}: the difference is found, and not used."
        )
    if response is not None and response.num_answered:
        wrong = response.num_false_hits / response.num_answered
        yield (
            f"A response cache would have answered {counted(response.num_answered)} requests; "
            f"{counted(response.num_false_hits)} of them ({percent(wrong)}) asked something "
            "with other content words: false hits."
        )


def _where_not(report: Report, kvshare: ArmResults) -> Iterator[str]:
    """Groups of some weight in which it brings next to nothing over prefix caching."""
    prefix = report.find("prefix")
    poor = []
    for group, template in _GROUPS.items():
        for key, figures in kvshare.by.get(group, {}).items():
            part = figures.num_tokens / max(1, kvshare.num_tokens)
            base = prefix.by.get(group, {}).get(key) if prefix else None
            gain = _gain(figures, base)
            if gain < 0.01 and part >= _MIN_PART and len(kvshare.by[group]) > 1:
                poor.append(f"{template.format(key)} ({points(gain)}, {percent(part, 0)} of the tokens)")
    if poor:
        over = "over prefix caching" if prefix else "at all"
        yield f"Where it does not pay, {over}: {'; '.join(poor)}."
    nothing = kvshare.by.get("origin", {}).get("none")
    if nothing is not None and nothing.num_requests:
        part = nothing.num_requests / kvshare.num_requests
        yield f"{percent(part)} of the requests find nothing at all to take over."
    cross = kvshare.by.get("origin", {}).get("cross_user")
    if cross is not None and kvshare.num_hit_tokens:
        part = cross.num_hit_tokens / kvshare.num_hit_tokens
        yield f"{percent(part)} of what is spared is in requests that take from another user's prompt, too."
    unknown = kvshare.by.get("origin", {}).get("unknown")
    if unknown is not None and kvshare.num_hit_tokens:
        part = unknown.num_hit_tokens / kvshare.num_hit_tokens
        yield (
            f"{percent(part)} of what is spared is in requests that take from another conversation; the log "
            "does not name the users, so it may have been the same one's."
        )


def _store(kvshare: ArmResults) -> Iterator[str]:
    if kvshare.storage.final_bytes:
        yield (
            f"Keeping all prompts' KV takes {size(kvshare.storage.final_bytes)} in the end; "
            "see hit rate against capacity for smaller stores."
        )


def _gain(figures: Figures, base: Figures | None) -> float:
    return (figures.token_hit_rate or 0.0) - ((base.token_hit_rate or 0.0) if base else 0.0)
