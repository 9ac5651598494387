"""The benchmarks that run in this process alone."""

from pathlib import Path
from typing import Literal

from kvshare_lab.cli.benchmark import Option, Runner, benchmark
from kvshare_lab.cli.options import (
    CHANGED,
    MAX_DEVIATION,
    MODEL,
    PROMPT_TOKENS,
    REPEATS,
    SEED,
    STORED,
    THREADS,
)


@benchmark(
    Option("profile", str, "What the device costs. [default: h100]"),
    Option("parts", str, "first_token, load, between_tokens, choosing and disk, with commas. [default: all]"),
    Option("tokens", str, "Lengths of the prompts for first_token, with commas."),
    Option("near", str, "Shares of near-duplicates for load, with commas. [default: 1,0.5,0]"),
    Option("requests", int, "Requests per arm for load.", min=1),
    Option("rounds", int, "Rounds per arm for between_tokens.", min=1),
    Option("ranks", int, "GPUs like this one, of a model so many times as wide. [default: 1]", min=1),
    Option("donors", str, "host: copies come from host memory; device: from vLLM's blocks. [default: host]"),
    Option("disks", str, "GB/s that a disk is read with, for disk, with commas. [default: 2,5,12]"),
    CHANGED,
    SEED,
)
def device(_: str) -> Runner:
    """Sharing on a simulated GPU: its times, copies, launches and waits."""
    from kvshare_lab.device import simulation

    return Runner(simulation.run)


@benchmark(
    Option(
        "workload", Literal["agent"], "agent: long transcripts with edits. [default: forms of one length]"
    ),
    STORED,
    PROMPT_TOKENS,
    Option("queries", int, "Number of prompts that are planned.", min=1),
    SEED,
)
def plan(_: str) -> Runner:
    """Time to find donors and plan, before anything is computed."""
    from kvshare_lab.bench import plan

    return Runner(plan.run)


@benchmark(
    Option("stored", int, "Prompts in the index.", min=1),
    PROMPT_TOKENS,
    Option("queries", int, "Queries of each kind.", min=1),
    Option("dense", bool, "Search by embedding, too. [default: dense]", flag="--dense/--no-dense"),
    SEED,
)
def index(_: str) -> Runner:
    """Time to find donors among very many stored prompts."""
    from kvshare_lab.bench import index

    return Runner(index.run)


@benchmark(
    STORED,
    PROMPT_TOKENS,
    Option("requests", int, "Requests that are measured at each size.", min=1),
    Option("dense", bool, "Search by embedding, too. [default: no-dense]", flag="--dense/--no-dense"),
    Option("threads", int, "Threads of the embedder. [default: all cores]", min=1),
    SEED,
)
def replay(_: str) -> Runner:
    """Requests a second that a replay handles, as the store grows."""
    from kvshare_lab.bench import replay

    return Runner(replay.run)


@benchmark(
    MODEL,
    Option("suite", str, "Suites, with commas. [default: those of OUT/stages.yaml, or all]"),
    Option("rules", str, "Repair rules, with commas. [default: all]"),
    Option("budgets", str, "Shares of layers x prompt tokens repaired. [default: 0.1,0.2]"),
    Option("charged", str, "The same, where the cost of selecting counts."),
    Option("plans", int, "Plans of each suite.", min=1),
    Option("half", int, "Half of the source documents, 0 or 1. [default: 0]", min=0, max=1),
    Option("data", Path, "Folder of data sets. [default: the project's own samples]"),
    Option("out", Path, "Folder of the figures. [default: fidelity]"),
    Option("stage", str, "Only these stages of OUT/stages.yaml."),
    Option("part", str, "This process's share of the work, such as 0/2."),
    Option("minutes", float, "Stop after this time; the next run goes on.", min=0),
    Option("rank", bool, "Rank candidate answers too."),
    Option("free_tokens", int, "Tokens of free-running answers. [default: 0, none]", min=0),
    Option("device", str, "cpu, cuda or auto. [default: cpu]"),
    Option("dtype", Literal["float32", "bfloat16"], "Of the weights and the KV. [default: float32]"),
    THREADS,
    Option("report", bool, "Write tables and plots of what is in OUT."),
    Option(
        "chains",
        int,
        "Instead of suites: so many chains of edits of edits. The options below are theirs.",
        min=1,
    ),
    Option("turns", int, "Edited prompts of a chain. [default: 40]", min=1),
    Option(
        "places", int, "Places that take turns in being edited. [default: 0, another one every time]", min=0
    ),
    Option("edits", int, "Places that one turn edits. [default: 1]", min=1),
    *[PROMPT_TOKENS, MAX_DEVIATION, SEED],
)
def fidelity(_: str) -> Runner:
    """Fidelity of reused KV by repair rule, on a real model."""
    from kvshare_lab.fidelity import command

    return Runner(command.run)


@benchmark(
    MODEL,
    Option("data", Path, "Folder with wmt19, rag_cacheblend and rag_full_context."),
    Option("samsum", Path, "SAMSum as published, a JSON list. [default: its columns are left out]"),
    Option("tables", str, "kvshare-1, cacheblend-12, cachecraft-20, cachecraft-21. [default: all]"),
    Option("rows", int, "Number of prompts of each data set.", min=1),
    PROMPT_TOKENS,
    Option("answer_tokens", int, "Tokens after which answers are cut.", min=1),
    SEED,
)
def papers(_: str) -> Runner:
    """Tables of the source papers, with any model."""
    from kvshare_lab.bench import papers

    return Runner(papers.run)


@benchmark(
    Option("data", Path, "A folder of data sets. [default: a few samples of the project]"),
    MODEL,
    Option("edits", int, "Pairs that differ by an edit. [default: 120; 5 of the samples]", min=0),
    Option("reordered", int, "Pairs of passages in another order. [default: 80; 4 of the samples]", min=0),
    Option("answer_tokens", int, "Tokens of greedy answers. [default: 40]", min=1),
    *[MAX_DEVIATION, SEED, THREADS],
)
def pairs(_: str) -> Runner:
    """Shared answers to edited and reordered prompts, over HTTP."""
    from kvshare_lab.bench import pairs

    return Runner(pairs.run)


@benchmark(
    MODEL,
    Option("turns", int, "Requests of the session.", min=2),
    Option("guide", int, "Number of rules in its system prompt.", min=1),
    SEED,
)
def agents(_: str) -> Runner:
    """Tokens that are reused in a coding agent's session."""
    from kvshare_lab.bench import agents

    return Runner(agents.run)


@benchmark(
    MODEL,
    Option("tokens", int, "Tokens of each answer.", min=2),
    REPEATS,
    THREADS,
    Option("streams", str, "Answers at a time, with commas."),
)
def grammar(_: str) -> Runner:
    """Decoding speed of answers that are held to a JSON schema."""
    from kvshare_lab.bench import grammar

    return Runner(grammar.run)


@benchmark(
    Option("idle", int, "Streams that bring a token every ten seconds.", min=1),
    Option("concurrency", int, "Number of active clients.", min=1),
    Option("requests", int, "Requests of each active client, per round and way.", min=1),
    REPEATS,
    SEED,
)
def connections(_: str) -> Runner:
    """Latency that the relay adds beside many idle streams."""
    from kvshare_lab.bench import connections

    return Runner(connections.run)


@benchmark(
    Option("rate", float, "Unrelated prompts a second.", min=1),
    Option("seconds", float, "Length of each arm.", min=1),
    Option("concurrency", int, "Clients of the other tenant.", min=1),
    REPEATS,
    SEED,
)
def flood(_: str) -> Runner:
    """What a tenant notices of another one that floods the server, with and without quotas."""
    from kvshare_lab.bench import flood

    return Runner(flood.run)


@benchmark(REPEATS, Option("words", int, "Length of the prompts, in words.", min=1), SEED)
def proxy(_: str) -> Runner:
    """Latency that the HTTP front and sharing add to a request."""
    from kvshare_lab.bench import proxy

    return Runner(proxy.run)
