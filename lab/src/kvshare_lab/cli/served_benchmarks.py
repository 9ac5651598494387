"""The benchmarks that start real vLLM servers; some of them run in this process, too."""

from pathlib import Path

from kvshare_lab.cli.benchmark import EMBEDDED, SIMULATED, VLLM, Option, Runner, benchmark, vllm_benchmark
from kvshare_lab.cli.options import (
    CHANGED,
    CONCURRENCY,
    DTYPE,
    EAGER,
    EDITS,
    KV_DTYPE,
    PROMPT_TOKENS,
    REPEATS,
    SEED,
    SERVED_MODEL,
    SERVED_THREADS,
)


@benchmark(
    Option("tokens", int, "Length of the prompts, in tokens.", min=1),
    *[SERVED_MODEL, SEED, SERVED_THREADS],
    engines=(EMBEDDED, VLLM),
)
def parity(engine: str) -> Runner:
    """Errors of partial attention and of moved KV."""
    if engine == VLLM:
        from kvshare_lab.vllm import parity as served

        return Runner(served.run, served.Config)
    from kvshare_lab.bench import parity

    return Runner(parity.run)


@benchmark(
    *[PROMPT_TOKENS, CHANGED, EDITS, REPEATS, SEED, SERVED_THREADS, DTYPE],
    Option("model", str, "A model; embedded: on real text; vLLM: random-8b, too. [default: random weights]"),
    Option("family", str, "Embedded: architecture of the random weights. [default: llama]", engine=EMBEDDED),
    KV_DTYPE,
    EAGER,
    engines=(EMBEDDED, VLLM),
)
def ttft(engine: str) -> Runner:
    """Time to first token of edited prompts, and its lower bound."""
    if engine == VLLM:
        from kvshare_lab.vllm import ttft as served

        return Runner(served.run, served.Config)
    from kvshare_lab.bench import ttft

    return Runner(ttft.run)


@benchmark(
    *[PROMPT_TOKENS, CHANGED, EDITS, REPEATS, SEED, SERVED_THREADS, DTYPE],
    Option("model", str, "A model. [default: the default chat model; vLLM: small random weights]"),
    Option(
        "objects",
        int,
        "Embedded: small objects of generated stores, whose starts are timed. [default: none]",
        min=0,
        engine=EMBEDDED,
    ),
    Option(
        "break_even",
        float,
        "Embedded: a disk of this share of the bytes a second from which it pays. [default: none]",
        min=0,
        engine=EMBEDDED,
    ),
    EAGER,
    engines=(EMBEDDED, VLLM),
)
def restart(engine: str) -> Runner:
    """Time to first token of prompts from the disk of an earlier process."""
    if engine == VLLM:
        from kvshare_lab.vllm import restart as served

        return Runner(served.run, served.Config)
    from kvshare_lab.bench import restart

    return Runner(restart.run)


@vllm_benchmark(
    CONCURRENCY,
    Option("requests", int, "Requests per arm and repeat.", min=2),
    Option(
        "rate", str, "Requests a second, with commas: an open loop at each rate. [default: a closed loop]"
    ),
    Option(
        "workload", Path, "A file whose prompts are sent, cut to --prompt-tokens. [default: made-up prompts]"
    ),
    *[SERVED_MODEL, PROMPT_TOKENS, CHANGED, EDITS, REPEATS, SEED, SERVED_THREADS, DTYPE, EAGER],
)
def load(_: str) -> Runner:
    """Throughput and latency of clients, with and without sharing."""
    from kvshare_lab.vllm import load

    return Runner(load.run, load.Config)


@vllm_benchmark(
    Option(
        "method",
        str,
        "What drafts are made from: ngram (the text), draft (a model), eagle, eagle3 or mtp (hidden states). "
        "[default: ngram]",
    ),
    Option("head", Path, "With eagle or eagle3: a folder with a head for --model. [default: a made one]"),
    Option("compiled", bool, "The model is compiled, as by default in vLLM. [default: eager]"),
    Option("tokens", int, "Length of the prompts, in tokens.", min=50),
    Option("answer", int, "Length of the answers, in tokens.", min=10),
    *[REPEATS, SERVED_MODEL, SEED, SERVED_THREADS],
)
def acceptance(_: str) -> Runner:
    """Tokens that each step of speculative decoding gives, shared against full."""
    from kvshare_lab.vllm import acceptance

    return Runner(acceptance.run, acceptance.Config)


@vllm_benchmark(
    Option("lengths", str, "Lengths of the prompts in tokens, with commas."),
    *[CHANGED, EDITS, REPEATS, SERVED_MODEL, SEED, SERVED_THREADS, DTYPE],
)
def way(_: str) -> Runner:
    """Where the time of a request goes besides the model: each stage from client to first token."""
    from kvshare_lab.vllm import way

    return Runner(way.run, way.Config)


@vllm_benchmark(
    Option("batches", int, "Number of batches of new prompts.", min=2),
    *[PROMPT_TOKENS, CHANGED, EDITS],
    Option("kv_bytes", int, "Bytes of the store. [default: fewer than are needed]", min=1),
    *[SERVED_MODEL, SEED, SERVED_THREADS, DTYPE, EAGER],
)
def steady(_: str) -> Runner:
    """Whether sharing still pays once the store is full."""
    from kvshare_lab.vllm import steady

    return Runner(steady.run, steady.Config)


@vllm_benchmark(
    Option("concurrency", int, "Number of running answers.", min=1),
    Option("tokens", int, "Tokens of each of these answers.", min=2),
    Option("every", int, "Tokens of an answer between two planned requests.", min=1),
    *[SERVED_MODEL, PROMPT_TOKENS, CHANGED, EDITS, REPEATS, SEED, SERVED_THREADS, DTYPE, EAGER],
)
def interference(_: str) -> Runner:
    """Pauses of running answers while shared prompts arrive."""
    from kvshare_lab.vllm import interference

    return Runner(interference.run, interference.Config)


@vllm_benchmark(
    Option("minutes", float, "Minutes of traffic.", min=0),
    Option("keeps_blocks", bool, "Next to KVShare another connector keeps whole blocks."),
    *[SERVED_MODEL, CONCURRENCY, SEED, SERVED_THREADS, KV_DTYPE, EAGER],
)
def soak(_: str) -> Runner:
    """Whether answers stay right under aborts and failed loads."""
    from kvshare_lab.vllm import soak

    return Runner(soak.run, soak.Config)


@vllm_benchmark(
    Option("seconds", float, "Time of the whole run; parts that do not fit are left out.", min=1),
    Option("parts", str, "Parts, with commas. [default: all]"),
    Option("out", Path, "A file that gets the document whenever a part has ended."),
    Option("model", str, "A folder or name that vLLM takes. [default: random-8b; on a CPU a small one]"),
    Option("backends", str, "Attention backends, with commas. [default: the one that vLLM chooses]"),
    Option("prompt_tokens", int, "Length of the longest prompts, in tokens.", min=128),
    CHANGED,
    EDITS,
    Option("shares", str, "load: shares of near-duplicates, with commas. [default: 1,.5,0]"),
    Option("rate", str, "load: requests a second, with commas. [default: by what stock vLLM completes]"),
    Option("load_tokens", int, "load: length of the prompts, in tokens.", min=1),
    CONCURRENCY,
    Option("requests", int, "load: requests of each arm at each share.", min=2),
    Option("streams", int, "Answers that run while other requests arrive.", min=1),
    Option("output_tokens", int, "Tokens of each of these answers.", min=2),
    Option("minutes", float, "Minutes of mixed traffic.", min=0),
    Option("kv_bytes", int, "Bytes of the store. [default: by the platform and the model]", min=1),
    *[REPEATS, SEED, SERVED_THREADS, DTYPE, EAGER],
)
def gpu(_: str) -> Runner:
    """One report of what only this machine's device can show."""
    from kvshare_lab.vllm import gpu

    return Runner(gpu.run, gpu.Config)


@benchmark(
    Option("tokens", str, "Lengths of the prompts, with commas."),
    Option("shares", str, "Shares of near-duplicates in mixes, with commas."),
    REPEATS,
    Option("requests", int, "Requests at each load.", min=2),
    Option(
        "disk_ms",
        float,
        "Milliseconds that a write of the proxy's metadata takes more. [default: 0]",
        min=0,
        engine=VLLM,
    ),
    Option(
        "seconds",
        float,
        "Time for all requests; what does not fit is left out. [default: no limit]",
        min=1,
        engine=VLLM,
    ),
    Option("profile", str, "What the device costs. [default: h100]", engine=SIMULATED),
    Option(
        "machines", str, "Machines derived from the profile, with commas. [default: all]", engine=SIMULATED
    ),
    Option("parts", str, "cells, first and priors, with commas. [default: all]", engine=SIMULATED),
    *[SERVED_MODEL, SEED, SERVED_THREADS, DTYPE, EAGER],
    engines=(VLLM, SIMULATED),
)
def inway(engine: str) -> Runner:
    """Whether sharing makes any request slower, on default settings."""
    if engine == SIMULATED:
        from kvshare_lab.device import inway

        return Runner(inway.run)
    from kvshare_lab.vllm import inway as served

    return Runner(served.run, served.Config)


@benchmark(
    *[SERVED_MODEL, CONCURRENCY, PROMPT_TOKENS, CHANGED, EDITS, REPEATS, SEED, SERVED_THREADS, DTYPE, EAGER],
    engines=(EMBEDDED, VLLM),
)
def burst(engine: str) -> Runner:
    """Near-duplicates that arrive at once, with nothing stored."""
    if engine == VLLM:
        from kvshare_lab.vllm import burst as served

        return Runner(served.run, served.Config)
    from kvshare_lab.bench import burst

    return Runner(burst.run)
