"""
Compares the decisions of replay, the embedded engine and vLLM with one replica, request by request.

    .venv/bin/python lab/scripts/same_as_served.py --requests 300 --json |
        .venv/bin/python lab/scripts/quote.py same-as-served
    .venv/bin/python lab/scripts/same_as_served.py LOG.jsonl.gz rag=QUESTIONS.jsonl.gz agent ...

A source is a log in any format that `kvshare replay` reads, a workload with or without a source file, or
`wildchat` or `sharegpt`: logs of these formats made of the samples in the package. The comparison is that of
tests/kvshare/replay/test_same_as_served.py. Exit status 1: they differ.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no part of the package

from kvshare_lab.bench.harness import environment
from tests.kvshare.replay import sample_logs
from tests.kvshare.replay.served import Comparison, compared, stream, summary
from tests.kvshare.replay.served_by_vllm import vllm_server
from tests.kvshare.replay.stage import Stage
from tests.kvshare.replay.synthetic import FakeEmbedder
from tests.kvshare.replay.test_same_as_served import CAPACITY_TOKENS, LOGS, MAX_PROMPT_TOKENS
from vector_index import Embedder


def main(
    sources: Annotated[list[str] | None, typer.Argument(show_default=" ".join(LOGS))] = None,
    requests: Annotated[int, typer.Option(help="In all, as many from each source.")] = 300,
    capacity_tokens: Annotated[int, typer.Option(help="A multiple of 7.")] = CAPACITY_TOKENS,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    embedder: Annotated[Literal["words", "bundled"], typer.Option(help="words: a toy.")] = "words",
    without_vllm: Annotated[bool, typer.Option("--without-vllm")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The configuration, too.")] = False,
) -> None:
    """Compare the decisions of replay, the embedded engine and vLLM with one replica, request by request."""
    sources = sources or list(LOGS)
    runs: list[dict[str, Any]] = []
    for own in (None, Embedder() if embedder == "bundled" else FakeEmbedder()):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = [_log(source, folder, requests // len(sources)) for source in sources]
            sent = stream(paths, num_requests=requests, max_tokens=max_prompt_tokens)
            stage = Stage(folder, capacity_tokens, own)
            with nullcontext() if without_vllm else vllm_server(stage) as server:
                found = asyncio.run(compared(stage, sent, vllm=server))
        runs.append({"search_by_embedding": own is not None, "requests": len(sent), **_run(found)})
    names = [Path(source).name if Path(source).is_file() else source.partition("=")[0] for source in sources]
    document = {
        "benchmark": "same-as-served",
        "config": {
            "sources": names,
            "capacity_tokens": capacity_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "embedder": embedder,
        },
        "runs": runs,
        "environment": environment(),
    }
    typer.echo(json.dumps(document if as_json else runs, indent=1))
    raise typer.Exit(int(any(sum(run["different"].values()) for run in runs)))


def _log(source: str, folder: Path, num_requests: int) -> Path:
    """The file itself, or a log that is made in the folder."""
    name, _, file = source.partition("=")
    if Path(source).is_file():
        return Path(source)
    return sample_logs.write(name, folder, num_requests=num_requests, sources=[Path(file)] if file else [])


def _run(found: dict[str, Comparison]) -> dict[str, Any]:
    """Of each engine and its replay, and of the engines with each other."""
    different = {f"{name}, replay": one.num_different for name, one in found.items()}
    answers = 0
    if "vllm" in found:
        vllm, embedded = found["vllm"].served, found["embedded"].served
        pairs = zip(vllm.decisions, embedded.decisions, strict=True)
        different["vllm, embedded"] = sum(a != b for a, b in pairs)
        answers = sum(a != b for a, b in zip(vllm.answers, embedded.answers, strict=True))
    return {
        "different": different,
        "different_answers_of_the_engines": answers,
        "searches_by_embedding": found["embedded"].num_embedded,
        "totals": summary(found["embedded"].served.decisions),
    }


if __name__ == "__main__":
    typer.run(main)
