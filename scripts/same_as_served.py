"""
Compares the decisions of replay, the embedded engine and vLLM with one replica, request by request.

    .venv/bin/python scripts/same_as_served.py --requests 300 --json > docs/measured/same-as-served.json
    .venv/bin/python scripts/same_as_served.py LOG.jsonl.gz rag=QUESTIONS.jsonl.gz agent ...

A source is a log in any format that `kvshare replay` reads, a workload with or without a source file, or
`wildchat` or `sharegpt`: logs of these formats made of the samples in the package. The comparison is that of
tests/kvshare/replay/test_same_as_served.py. Exit status 1: they differ.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are no part of the package

from kvshare.bench.harness import environment
from tests.kvshare.replay import sample_logs
from tests.kvshare.replay.served import Comparison, compared, stream, summary
from tests.kvshare.replay.stage import Stage
from tests.kvshare.replay.synthetic import FakeEmbedder
from tests.kvshare.replay.test_same_as_served import CAPACITY_TOKENS, LOGS, MAX_PROMPT_TOKENS
from vector_index import Embedder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sources", nargs="*", default=LOGS)
    parser.add_argument("--requests", type=int, default=300, help="in all, as many from each source")
    parser.add_argument("--capacity-tokens", type=int, default=CAPACITY_TOKENS, help="a multiple of 7")
    parser.add_argument("--max-prompt-tokens", type=int, default=MAX_PROMPT_TOKENS)
    parser.add_argument("--embedder", choices=("words", "bundled"), default="words", help="words: a toy")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--json", action="store_true", help="the configuration, too")
    arguments = parser.parse_args()
    document = asyncio.run(_measure(arguments))
    json.dump(document if arguments.json else document["runs"], sys.stdout, indent=1)
    sys.stdout.write("\n")
    return int(any(sum(run["different"].values()) for run in document["runs"]))


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for by_embedding in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = [_log(source, folder, arguments) for source in arguments.sources]
            requests = stream(paths, num_requests=arguments.requests, max_tokens=arguments.max_prompt_tokens)
            embedder = Embedder() if arguments.embedder == "bundled" else FakeEmbedder()
            stage = Stage(folder, arguments.capacity_tokens, embedder if by_embedding else None)
            found = await compared(stage, requests, vllm=not arguments.without_vllm)
        runs.append({"search_by_embedding": by_embedding, "requests": len(requests), **_run(found)})
    return {
        "benchmark": "same-as-served",
        "config": {
            "sources": [source.partition("=")[0] for source in map(_name, arguments.sources)],
            "capacity_tokens": arguments.capacity_tokens,
            "max_prompt_tokens": arguments.max_prompt_tokens,
            "embedder": arguments.embedder,
        },
        "runs": runs,
        "environment": environment(),
    }


def _log(source: str, folder: Path, arguments: argparse.Namespace) -> Path:
    name, _, file = source.partition("=")
    if Path(source).is_file():
        return Path(source)
    share = arguments.requests // len(arguments.sources)
    return sample_logs.write(name, folder, num_requests=share, sources=[Path(file)] if file else [])


def _name(source: str) -> str:
    """Without its folder."""
    return Path(source).name if Path(source).is_file() else source


def _run(found: dict[str, Comparison]) -> dict[str, Any]:
    """Of each engine and its replay, and of the engines with each other."""
    different = {f"{name}, replay": one.num_different for name, one in found.items()}
    answers = 0
    if "vllm" in found:
        vllm, embedded = found["vllm"].served, found["embedded"].served
        pairs = zip(vllm.decisions, embedded.decisions, strict=True)
        different["vllm, embedded"] = sum(a != b for a, b in pairs)
        answers = sum(a != b for a, b in zip(vllm.answers, embedded.answers, strict=True))
    totals = summary(found["embedded"].served.decisions)
    return {
        "different": different,
        "different_answers_of_the_engines": answers,
        "searches_by_embedding": found["embedded"].num_embedded,
        "totals": totals,
    }


if __name__ == "__main__":
    sys.exit(main())
