"""Replays of logs."""

from collections.abc import Callable

from kvshare.cli.views.parts import Columns, Document, Parts, of, table
from kvshare.cli.views.units import number, percent, size

_MOST_LINES = 5  # of a log, that could not be read

_POLICIES: Columns = {
    "policy": of("arm"),
    "not computed": of("token_hit_rate", percent, 1),
    "requests >= 50 %": of("request_hit_rate_50", percent, 1),
    ">= 90 %": of("request_hit_rate_90", percent, 1),
    "TTFT saved": lambda row: f"{1000 * (row['ttft_saved_s']['mean'] or 0):,.0f} ms",
    "store": lambda row: size(row["storage"]["final_bytes"]),
}
_FIGURES: Columns = {
    "figure": lambda figure: figure["name"].replace("_", " "),
    "a": of("a", percent),
    "b": of("b", percent),
    "b - a": lambda figure: f"{100 * figure['difference']:+.2f}",
    "95 % interval": lambda figure: f"{100 * figure['low']:+.2f} to {100 * figure['high']:+.2f}",
    "": lambda figure: "differs" if figure["differs"] else "",
}
_PREDICTIONS: Columns = {
    "predicted by": of("arm"),
    "tokens not computed": of("token_hit_rate", percent),
    "mean error": of("mean_difference", percent),
    "within 5 %": of("within_5_percent", percent),
}
_TIMES: Columns = {
    "share not computed": lambda row: f"from {percent(row['from'], 0)}",
    "requests": of("num_requests", number),
    "median TTFT": lambda row: f"{number(row['p50'], ',.0f')} ms",
    "p99": lambda row: f"{number(row['p99'], ',.0f')} ms",
}
_SUBSET: Columns = {
    "policy": of("arm"),
    "not computed": of("token_hit_rate", percent),
    "requests >= 50 %": lambda row: percent(row["at_least"]["50"]),
    ">= 70 %": lambda row: percent(row["at_least"]["70"]),
    ">= 90 %": lambda row: percent(row["at_least"]["90"]),
}


def _of_disk(name: str) -> Callable[[Document], str]:
    return lambda stack: size(stack["disk"][name]) if stack["disk"] else ""


_TIER_HITS: Columns = {
    "eviction": of("eviction"),
    "arm": lambda stack: stack["arm"].replace("kvshare-", ""),
    "host": lambda stack: size(stack["host"]["max_bytes"]),
    "disk": _of_disk("max_bytes"),
    "exact": of("exact_share", percent, 1),
    "in host": of("exact_share_of_host", percent, 1),
    "all hits": of("hit_share", percent, 1),
}
_TIER_BYTES: Columns = {
    "eviction": of("eviction"),
    "written": _of_disk("bytes_written"),
    "read": _of_disk("bytes_read"),
    "evicted": lambda stack: number(stack["evictions"]["whole"]),
    "shortened": lambda stack: number(stack["evictions"]["end"]),
    "not stored": of("num_not_stored", number),
}


def replay(document: Document) -> Parts:
    """Yield the four main policies and the verdict; the report has all policies."""
    from kvshare.replay.report import parse_report, verdict

    report, data = parse_report(dict(document)), document["data"]
    rows = [policy.model_dump() for policy in report.main]
    requests = f"{number(data['num_requests'])} requests of {number(data['num_conversations'])} conversations"
    speed = f"{number(document['times']['requests_per_s'], ',.0f')} requests/s"
    yield f"{requests}, {number(data['num_tokens'])} prompt tokens; {speed}"
    yield from _unreadable(document)
    if rows:
        yield table(_POLICIES, rows, boxed=True)
    if num_others := len(report.arms) - len(rows):
        yield f"{num_others} more rows, by policy and store, are in the report."
    yield verdict(report)


def diff(document: Document) -> Parts:
    arms, only = document["arms"], {side: document[f"only_in_{side}"] for side in "ab"}
    for policy in arms:
        yield table(_FIGURES, policy["figures"], title=policy["label"], boxed=True)
    for side, missing in only.items():
        if missing:
            yield f"only in {side}: {', '.join(missing)}"
    if not (arms or any(only.values())):
        yield "the two runs have no policy in common"


def live(document: Document) -> Parts:
    ttft, counts = document["ttft_ms"], document["token_counts"]
    yield (
        f"{'' if document['complete'] else 'interrupted: '}{number(document['num_requests'])} requests, "
        f"{number(document['num_failed'])} failed; {number(document['requests_per_s'], ',.1f')} requests/s; "
        f"time to first token {number(ttft['p50'], ',.0f')} ms median, {number(ttft['p99'], ',.0f')} ms p99;"
        f" the server reports that {percent(document['reported']['token_hit_rate'])} of the prompt tokens "
        "were not computed"
    )
    yield from _unreadable(document)
    if counts["num_unlike"]:
        yield (
            f"warning: for {number(counts['num_unlike'])} of {number(counts['num_requests'])} requests the "
            f"server counts other tokens than the replay ({number(counts['server'])} and "
            f"{number(counts['here'])} in total), more than a chat template explains. Pass the server's "
            "tokenizer with --tokenizer; the predictions are those of another one"
        )
    yield table(_PREDICTIONS, document["predicted"], boxed=True)
    yield table(_TIMES, document["ttft_ms_by_cached_share"], boxed=True)


def paper(document: Document) -> Parts:
    first, subset = document["figure_2"], document["figure_4"]
    yield (
        f"{number(first['num_prompts'])} first prompts: {percent(first['shares']['identical'])} have an "
        f"identical earlier one, {percent(first['shares']['similar'])} a similar one; the subset of similar "
        f"prompts has {number(subset['num_prompts'])} prompts of {number(subset['num_tokens'])} tokens"
    )
    yield from _unreadable(document)
    yield table(_SUBSET, subset["arms"], boxed=True)


def tiers(document: Document) -> Parts:
    data, stacks = document["data"], document["stacks"]
    yield f"{number(data['num_requests'])} requests, {number(data['num_tokens'])} prompt tokens"
    yield from _unreadable(document)
    for arm in document["unlimited"]:
        exact, approximate = number(arm["exact_tokens"]), number(arm["approximate_tokens"])
        stored = f"{size(arm['num_bytes'])}, {exact} tokens exact, {approximate} approximate"
        yield f"{arm['arm']}, without limits: {stored}"
    yield table(_TIER_HITS, stacks, title="Of these, with tiers", boxed=True)
    yield table(_TIER_BYTES, stacks, title="Written, read and evicted", boxed=True)


def _unreadable(document: Document) -> Parts:
    """Rows of the log."""
    unreadable = document["data"]["unreadable"]
    if first := unreadable["lines"][:_MOST_LINES]:
        yield f"{number(unreadable['num_rows'])} rows could not be read:"
        for line in first:
            yield f"  {line['source']}:{line['line']}  {line['reason']}"
        if num_more := unreadable["num_rows"] - len(first):
            yield f"  and {number(num_more)} more"
