"""The page: order, headings, words around plots and tables; everything that comes from data is escaped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from html import escape

from kvshare.replay.report import tables
from kvshare.replay.report.figures import Drawn
from kvshare.replay.report.reading import Report
from kvshare.replay.report.style import page_css
from kvshare.replay.report.tables import counted, duration, percent, size
from kvshare.replay.report.words import headline, sentences

_GROUPS = {
    "length": "By length of the prompt, in tokens",
    "turn": "By turn of the conversation",
    "language": "By language",
}
_MAX_LINES = 50  # of unreadable rows shown
_READING = """Token hit rate: the share of prompt tokens that need no computing; recomputed: the others.
“Requests ≥ 50 %”: requests of whose tokens at least half need no computing, as the KVShare paper counts.
TTFT saved: tokens not computed, at the given speed of prefill; reading them from the store is not counted.
A false hit: a response cache's answer to a prompt with other content words. Nothing here measures the quality
of answers: prefix caching changes none; chunks, and KVShare's copies, are approximations where what stands
before them differs."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(report: Report, drawn: Mapping[str, Drawn]) -> str:
    """The whole document. `drawn`: the plots by name; what could not be drawn has a note instead."""
    sections = [
        ("summary", "", _summary(report)),
        ("arms", "The ways of caching", _arms(report)),
        ("plots", "Plots", "".join(_figure(one) for one in drawn.values())),
        ("groups", "Who gains", _groups(report)),
        ("plans", "Plans and time", _plans(report)),
        ("data", "The log", _data(report)),
        ("run", "Configuration, versions, and how to reproduce", _run(report)),
    ]
    body = "".join(_section(*section) for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{escape(_title(report))}</title><style>{page_css()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def command(report: Report) -> str:
    """The command line that gives the same results."""
    config = report.config
    tokenizer = config.get("tokenizer") or {}
    words = ["kvshare", "replay", *(file.name for file in report.data.files)]
    words += ["--arms", ",".join(map(str, config.get("arms") or ()))]
    if config.get("capacities_tokens"):
        words += ["--capacity", ",".join(map(str, config["capacities_tokens"]))]
    for key in ("format", "bytes_per_token", "prefill_tokens_per_s", "limit", "interleave", "seed"):
        if config.get(key) is not None:
            words += [f"--{key.replace('_', '-')}", str(config[key])]
    if tokenizer.get("name") not in (None, "demo"):
        words += ["--tokenizer", str(tokenizer["name"])]
    return shlex.join(words)


def _section(name: str, title: str, content: str) -> str:
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section id="{name}">{heading}{content}</section>'


def _title(report: Report) -> str:
    names = [file.name for file in report.data.files]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"KVShare replay of {shown}" if shown else "KVShare replay"


def _summary(report: Report) -> str:
    data, times = report.data, report.times
    unreadable = data.unreadable.num_rows
    users = f"{counted(data.num_users)} users" if data.num_users else "users not named"
    about = (
        f"{counted(data.num_requests)} requests of {counted(data.num_conversations)} "
        f"conversations, {users}, "
        f"{counted(data.num_tokens)} prompt tokens"
        + (f"; {counted(unreadable)} rows could not be read" if unreadable else "")
        + (f". Replayed {_time(times.started_at)}" if times.started_at else "")
    )
    links = {
        "arms": "Ways of caching", "plots": "Plots", "groups": "Who gains", "plans": "Plans and time",
        "data": "The log", "run": "Configuration",
    }  # fmt: skip
    navigation = " ".join(f'<a href="#{name}">{text}</a>' for name, text in links.items())
    return (
        f'<h1>{escape(_title(report))}</h1><p class="soft">{escape(about)}.</p>'
        f'<p class="headline">{escape(headline(report))}</p>{_cards(report)}'
        f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in sentences(report))}</ul>"
        f"<nav>{navigation}</nav>"
    )


def _time(iso: str) -> str:
    """As people write it: "2026-01-02 03:04 UTC"."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso.endswith("+00:00") else iso


def _cards(report: Report) -> str:
    kvshare = report.kvshare
    cards = []
    for name, family in (("prefix caching", "prefix"), ("exact chunks", "chunks")):
        if (arm := report.find(family)) is not None:
            cards.append((percent(arm.token_hit_rate), f"not computed with {name}"))
    if kvshare is not None:
        cards.append((percent(kvshare.token_hit_rate), f"not computed with {kvshare.arm}"))
    if (oracle := report.find("oracle")) is not None:
        cards.append((percent(oracle.token_hit_rate), "seen before at all (oracle)"))
    if kvshare is not None:
        cards.append((duration(kvshare.ttft_saved_s.mean), "TTFT saved per request, estimated"))
    inside = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<div class="cards">{inside}</div>' if cards else ""


def _arms(report: Report) -> str:
    if not report.arms:
        return "<p>No arm was replayed.</p>"
    finite = [arm for arm in report.arms if arm.capacity_tokens is not None]
    small = f"<h3>With finite stores</h3>{tables.arms_table(finite)}" if finite else ""
    return tables.arms_table(report.endless) + small + (f"<p class='soft'>{_READING}</p>")


def _figure(one: Drawn) -> str:
    picture = one.svg or f'<p class="soft">Not drawn: {escape(one.missing)}.</p>'
    words = f"<figcaption>{escape(one.caption)}</figcaption>"
    return f"<figure><h3>{escape(one.title)}</h3>{picture}{words}</figure>"


def _groups(report: Report) -> str:
    parts = []
    for group, title in _GROUPS.items():
        if inside := tables.group_table(report, group):
            parts.append(f"<h3>{title}</h3><p class='soft'>Token hit rates, infinite stores.</p>{inside}")
    if inside := tables.origin_table(report):
        parts.append(f"<h3>The same user, or another</h3>{inside}")
    return "".join(parts) or "<p>Nothing is known of groups.</p>"


def _plans(report: Report) -> str:
    parts = [tables.plans_table(report) if report.endless else "<p>No arm was replayed.</p>"]
    kvshare = report.kvshare
    if kvshare is not None and kvshare.reasons:
        rows = [(reason, counted(number)) for reason, number in kvshare.reasons.items()]
        parts.append(f"<h3>Why “{escape(kvshare.label)}” shared nothing, or no more</h3>")
        parts.append(tables.pairs(rows, ("reason", "requests")))
    if kvshare is not None and any(kvshare.shift_tokens.counts):
        shifts = kvshare.shift_tokens
        ends = [f"{edge:g}" for edge in shifts.edges]
        rows = [(f"{ends[i]} or more", counted(n)) for i, n in enumerate(shifts.counts) if n]
        parts.append("<h3>How far copies are moved</h3>")
        parts.append(tables.pairs(rows, ("tokens, up to the next row", "copies")))
    if report.similarity is not None:
        known = [one for one in report.similarity.thresholds if one.share is not None]
        rows = [(f"{one.distance:g}", percent(one.share)) for one in known]
        parts.append("<h3>Requests with an earlier prompt that near in meaning</h3>")
        parts.append(tables.pairs(rows, ("cosine distance at most", "requests")))
    return "".join(parts)


def _data(report: Report) -> str:
    data = report.data
    rows = [(file.name, f"{size(file.num_bytes)}, sha256 {file.sha256[:16]}…") for file in data.files]
    parts = [tables.pairs(rows, ("file", ""))] if rows else []
    lengths = data.length_histogram
    if lengths.count:
        buckets = zip(lengths.edges, lengths.counts, strict=False)
        spread = [(f"{counted(low)} or more", counted(prompts)) for low, prompts in buckets if prompts]
        mean, longest = counted(lengths.mean), counted(lengths.max)
        parts.append(f"<h3>Prompts by length; mean {mean}, longest {longest} tokens</h3>")
        parts.append(tables.pairs(spread, ("tokens, up to the next row", "prompts")))
    return "".join(parts) + "<h3>Rows that could not be read</h3>" + "".join(_unreadable(report))


def _unreadable(report: Report) -> Iterator[str]:
    unreadable = report.data.unreadable
    number = unreadable.num_rows
    if not number:
        yield "<p>There are none.</p>"
        return
    reasons = [(reason, counted(rows)) for reason, rows in unreadable.reasons.items()]
    yield tables.pairs(reasons, ("reason", "rows"))
    lines = unreadable.lines[:_MAX_LINES]
    rows = [(f"{line.source}:{line.line}", line.reason) for line in lines]
    more = f"; the first {len(lines)} of {counted(number)}" if number > len(lines) else ""
    yield f"<details><summary>Which{more}</summary>{tables.pairs(rows, ('file:line', 'reason'))}</details>"


def _run(report: Report) -> str:
    versions = [(str(name), str(version)) for name, version in report.versions.items()]
    tokenizer = report.config.get("tokenizer") or {}
    return (
        "<p>The same files in the same order give the same results, times aside:</p>"
        f'<pre class="wrap">{escape(command(report))}</pre>'
        f"<p class='soft'>sha256 of the tokens, in order: {escape(report.data.sha256)}; "
        f"of the tokenizer: {escape(str(tokenizer.get('sha256', '–')))}.</p>"
        f"{tables.pairs(versions, ('software', 'version'))}"
        "<details><summary>The whole configuration</summary>"
        f"<pre>{escape(json.dumps(report.config, indent=2, ensure_ascii=False))}</pre></details>"
        "<p class='soft'>No prompt text, token or user name is in this page.</p>"
    )
