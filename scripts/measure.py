"""
Runs every benchmark that the README quotes, one after the other, and prints its table.

    .venv/bin/python scripts/measure.py [NAME ...] > table.md      # documents: docs/measured/NAME.json
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "measured"
Document = dict[str, Any]


def _ttft(d: Document) -> str:
    return (
        f"{d['speedup']:.1f}x faster than full prefill, {100 * d['of_ideal']:.0f} % of the ideal "
        f"({d['ideal_speedup']:.1f}x); a prefix cache alone: {d['exact_prefix_speedup']:.1f}x; "
        f"{100 * d['recomputed_fraction']:.0f} % of the tokens computed"
    )


def _plan(d: Document) -> str:
    dense = d["with_dense"]
    return (
        f"{d['p50_ms']:.1f} ms median, {d['p99_ms']:.1f} ms p99; with an embedding {dense['p50_ms']:.0f} ms; "
        f"{d['metadata_bytes_per_prompt'] / 1000:.1f} KB of memory and "
        f"{d['mapped_file_bytes_per_prompt'] / 1000:.1f} KB of mapped files a prompt"
    )


def _demo(d: Document) -> str:
    arms = ("full", "kvshare", "placeholders_only", "full_reuse")
    shown = ", ".join(f"{arm.replace('_', ' ')} {100 * d['accuracy'][arm]:.1f} %" for arm in arms)
    return f"{shown}; KVShare computed {100 * d['kvshare_computed_fraction']:.0f} % of the tokens"


def _vllm_parity(d: Document) -> str:
    modes = ", ".join(f"{name} {mode['max_abs_logprob_error']:.1e}" for name, mode in d["modes"].items())
    return f"{d['max_abs_logprob_error']:.1e} ({modes})"


def _vllm_ttft(d: Document) -> str:
    computed = 100 * d["tokens"]["computed_fraction"]
    return (
        f"{d['speedup']:.1f}x faster than full prefill, {100 * d['of_ideal']:.0f} % of the ideal "
        f"({d['ideal_speedup']:.1f}x); vLLM's own prefix cache: {d['prefix_cache_speedup']:.1f}x; "
        f"{computed:.0f} % of the tokens computed; the proxy adds {d['front_ms']:.0f} ms"
    )


def _load(d: Document) -> str:
    return (
        f"{d['throughput_ratio']:.2f}x the requests per second, {d['ttft_p50_ratio']:.2f}x the median time "
        f"to first token of vLLM with prefix caching; with unrelated requests alone "
        f"{1 - d['unrelated_loss']:.2f}x the requests per second"
    )


def _steady(d: Document) -> str:
    speedups = ", ".join(f"{speedup:.1f}" for speedup in d["speedups"])
    return (
        f"last batch {100 * d['last_over_first']:.0f} % of the first (speedups {speedups}); "
        f"{d['evicted_segments']} segments evicted, never more than the store's bytes"
    )


def _soak(d: Document) -> str:
    return (
        f"{d['wrong_outputs']} wrong of {d['right_outputs'] + d['wrong_outputs']} exact or unshared answers; "
        f"{d['approximate_outputs']} approximate ones agree in {100 * d['approximate_agreement']:.0f} % of "
        f"their tokens; {d['aborted']} aborts, {d['evictions']} evictions, "
        f"{d['preemptions']['vLLM with KVShare']:.0f} preemptions"
    )


def _replay(d: Document) -> str:
    first, last = d["windows"][0], d["windows"][-1]
    return (
        f"{d['requests_per_s']:.0f} requests/s ({first['requests_per_s']:.0f} over {first['stored']:,}); "
        f"planning p99 {last['plan']['p99_ms']:.1f} ms; {d['memory_bytes']['RssAnon'] / 1e9:.2f} GB of memory"
    )


def _index(d: Document) -> str:
    warm, cold = (
        max(kind["p99_ms"] for kind in d["nomination"][arm]["large"].values()) for arm in ("warm", "cold")
    )
    return (
        f"nomination p99 {warm:.1f} ms ({cold:.1f} after the page cache was dropped); "
        f"{d['disk_bytes']['total'] / 1e9:.1f} GB on disk; "
        f"{d['memory_bytes']['after_queries']['RssAnon'] / 1e9:.1f} GB of memory and "
        f"{d['memory_bytes']['after_queries']['RssFile'] / 1e9:.1f} GB of mapped files"
    )


ROWS: dict[str, tuple[str, str, Callable[[Document], str]]] = {
    "ttft-2000": (
        "Time to first token, 2,000 tokens, 10 % changed in 5 places",
        "ttft --engine embedded --prompt-tokens 2000 --changed 0.1 --edits 5",
        _ttft,
    ),
    "ttft-4000": (
        "The same with 4,000 tokens",
        "ttft --engine embedded --prompt-tokens 4000 --changed 0.1 --edits 5",
        _ttft,
    ),
    "ttft-chat-model": (
        "Default chat model on real text, 2,000 tokens, 10 % changed in 5 places",
        "ttft --engine embedded --model default --prompt-tokens 2000 --changed 0.1 --edits 5 --repeats 3",
        _ttft,
    ),
    "parity": (
        "Largest logit error where KVShare must equal the model, float32",
        "parity",
        lambda d: f"{d['max_abs_logit_error']:.1e}",
    ),
    "plan": (
        "Nomination, alignment and planning of a 2,000-token prompt over 10,000 stored ones",
        "plan --stored 10000",
        _plan,
    ),
    "storage": (
        "KV owned by 100 near-duplicates over storing each whole",
        "storage",
        lambda d: f"{d['ratio']:.2f} ({100 * d['changed']:.0f} % changed in {d['edits']} places)",
    ),
    "demo": ("Right answers of the demo model on near-duplicate pairs", "demo", _demo),
    "proxy": (
        "Added to a request with nothing to share, median",
        "proxy",
        lambda d: f"{d['added_ms']:.1f} ms ({d['prompt_tokens']} tokens)",
    ),
    "vllm-parity": (
        "Stock vLLM: largest log-probability error where KVShare must equal a full prefill, float32",
        "parity --engine vllm",
        _vllm_parity,
    ),
    "vllm-ttft": (
        "Stock vLLM: time to first token through the proxy, 4,000 tokens, 10 % changed in 5 places",
        "ttft --engine vllm --prompt-tokens 4000 --changed 0.1 --edits 5 --eager",
        _vllm_ttft,
    ),
    "vllm-load": (
        "Stock vLLM: 8 clients, near-duplicates and unrelated prompts half and half",
        "load --engine vllm --concurrency 8 --eager",
        _load,
    ),
    "vllm-steady": (
        "Stock vLLM: new compositions over a full, evicting store",
        "steady --engine vllm --batches 6 --eager",
        _steady,
    ),
    "vllm-soak": (
        "Stock vLLM: mixed traffic with aborts and evictions",
        "soak --engine vllm --minutes 5 --eager",
        _soak,
    ),
    "replay": (
        "Replay without a model, over 100,000 stored prompts of 500 tokens",
        "replay --stored 100000",
        _replay,
    ),
    "replay-dense": (
        "The same with the search by meaning, embeddings included, over 1,000",
        "replay --stored 1000 --requests 500 --dense",
        _replay,
    ),
    "index": (
        "Nomination among 1,000,000 stored prompts in Qdrant Edge, by prefix, fingerprints and meaning",
        "index --stored 1000000",
        _index,
    ),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    kvshare = Path(sys.executable).with_name("kvshare")
    lines = ["| what | measured | command |", "|---|---|---|"]
    for name in sys.argv[1:] or ROWS:
        title, command, show = ROWS[name]
        run = subprocess.run(
            [kvshare, "bench", *command.split(), "--json"], stdout=subprocess.PIPE, check=True, text=True
        )
        (FOLDER / f"{name}.json").write_text(run.stdout, encoding="utf-8")
        lines.append(f"| {title} | {show(json.loads(run.stdout))} | `kvshare bench {command} --json` |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
