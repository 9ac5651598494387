"""
Plays logs through memory and a disk of ten times its size under each policy of eviction, and prints the table
of docs/benchmarks.md; stores its document in docs/measured/replay-tiers.json.

    .venv/bin/python lab/scripts/compare_evictions.py DATA [NAME ...] [--limit REQUESTS] > table.md

DATA has the logs that compare_evictions.yaml names; of those that are not named the figures stay. With a
limit, for a try, only so many requests of each log are played, and nothing is stored. Prompts are
kept in blocks, by the product's policies (`kvshare_lab.bench.block_cache`). Next to them are vLLM's own
offloading and LMCache (`offloaded_blocks.py`), and the oracle, which knows the future (`oracle_cache.py`).
Memory is a share of all blocks of the log. All figures are shares of the blocks of equal prefixes that a
cache without limits reuses.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from delta_tree import EVICTION_QUEUES
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare_lab.bench.block_cache import BlockCache
from kvshare_lab.bench.oracle_cache import RequestBlocks, best_hits, blocks_of
from quote import FOLDER, store

CONFIG: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
LOGS: dict[str, dict[str, Any]] = CONFIG["logs"]
SHARES: list[int] = CONFIG["shares"]  # percent
STORED = FOLDER / "replay-tiers.json"
POLICIES = ("adaptive", "copies", "s3-fifo", "worth")  # lru is copies where only equal prefixes are reused
OF_OTHERS = ("vllm lru", "vllm arc", "lmcache")
HEADS = (*POLICIES, *OF_OTHERS, "oracle")
CHUNK_TOKENS = 256  # LMCache's `chunk_size`, by default
TIMES = 10  # the disk's size in those of memory
Document = dict[str, Any]


def main(
    data: Path,
    names: Annotated[list[str] | None, typer.Argument(help=", ".join(LOGS))] = None,
    limit: Annotated[int | None, typer.Option(help="Requests of each log; nothing is stored.")] = None,
) -> None:
    """Compare the policies of eviction on the logs, all or those named, and print the table."""
    is_kept = names is not None and limit is None and STORED.exists()
    logs = json.loads(STORED.read_text("utf-8"))["logs"] if is_kept else {}
    for name in names or LOGS:
        log = LOGS[name] if limit is None else {**LOGS[name], "limit": min(limit, LOGS[name]["limit"])}
        logs[name] = _compared(log, data)
        typer.echo(f"{name}: {logs[name]['seconds']} s", err=True)
        document = {"shares": SHARES, "logs": {each: logs[each] for each in LOGS if each in logs}}
        if limit is None:
            store(STORED.stem, document)
    typer.echo("\n".join(table(document)))


def table(document: Document) -> Iterator[str]:
    """Of each log and size: what is reused in all, and in brackets what of it is in memory."""
    heads = ["log", "memory, disk", *HEADS]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, log in document["logs"].items():
        for share, row in zip(document["shares"], log["rows"], strict=True):
            cells = [f"{100 * in_all:.1f} ({100 * in_memory:.1f})" for in_all, in_memory in row]
            yield f"| {LOGS[name]['title']} | {share} %, {TIMES * share} % | {' | '.join(cells)} |"


def _compared(log: Document, data: Path) -> Document:
    began = time.perf_counter()
    paths, limit = [data / file for file in log["files"]], log["limit"]
    with RequestStream(paths, interleave=log.get("interleave", 1), limit=limit) as stream:
        tokenized = list(RequestTokenizer.load(None).tokenize(stream))
    blocks = blocks_of(tokenized, log["block"])
    of_chunk = max(1, CHUNK_TOKENS // log["block"])
    chunks = blocks_of(tokenized, of_chunk * log["block"])
    num_blocks = len({digest for each in blocks for digest in each.digests})
    most = best_hits(blocks, num_blocks)
    rows: list[Document] = [{} for _ in SHARES]
    for head in HEADS:
        known: dict[int, float] = {}
        for share, row in zip(SHARES, rows, strict=True):
            for percent in (share, min(100, TIMES * share)):
                if percent not in known:
                    capacity = percent * num_blocks // 100
                    num_hit = (
                        of_chunk * _hits("vllm lru", chunks, capacity // of_chunk)
                        if head == "lmcache"
                        else _hits(head, blocks, capacity)
                    )
                    known[percent] = round(num_hit / most, 4)
            row[head] = [known[min(100, TIMES * share)], known[share]]
    return {
        "num_requests": len(blocks),
        "num_blocks": num_blocks,
        "reused_blocks": most,
        "block": log["block"],
        "rows": [[row[head] for head in HEADS] for row in rows],
        "seconds": round(time.perf_counter() - began, 1),
    }


def _hits(head: str, blocks: list[RequestBlocks], capacity: int) -> int:
    if head == "oracle":
        return best_hits(blocks, capacity)
    if head in OF_OTHERS:
        from kvshare_lab.bench.offloaded_blocks import offloaded_hits  # imports vLLM

        return offloaded_hits(blocks, capacity, head.removeprefix("vllm "))
    return BlockCache(EVICTION_QUEUES[head], capacity).hits(blocks)


if __name__ == "__main__":
    typer.run(main)
