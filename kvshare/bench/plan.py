"""
`kvshare bench plan`: nomination + alignment + planning for a prompt, over many stored ones, without any
model.

The store holds variants of a few hundred templates, so a query has good donors among many strangers. Meaning
vectors of stored prompts are noisy copies of their template's (embedding all would take minutes and is not
what is measured); the query's text is really embedded in the `with_dense` arm.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import DeltaTree, Node, NodeDraft, Piece, PieceTable, Segment, TokenIds, new_segment_id
from kvshare.bench.figures import grown, memory_bytes
from kvshare.bench.harness import edited, milliseconds, random_prompt
from kvshare.index_factory import nominator_settings
from kvshare.settings import Settings, load_settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import Plan
from kvshare.sharing.planner import PlannerLimits, make_plan
from vector_index import (
    Embedder,
    Nominator,
    PromptRecord,
    PromptText,
    QdrantEdgeIndex,
    TextEmbedder,
)

NAMESPACE = "bench"
_VOCAB_SIZE = 32000
_TEMPLATES = 200
_CHANGED, _EDITS = 0.1, 5
RATES = Rates(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1024)


def run(
    *, stored: int = 10_000, prompt_tokens: int = 2000, queries: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Times of `queries` new variants against `stored` prompts; memory of what was stored for each."""
    return asyncio.run(_run(stored, prompt_tokens, queries, seed))


async def _run(num_stored: int, num_tokens: int, num_queries: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    settings = load_settings()
    templates = [random_prompt(rng, num_tokens, _VOCAB_SIZE) for _ in range(_TEMPLATES)]
    embedder = _Embedder(Embedder())
    texts = [_text(rng) for _ in templates]
    embedder.learn(texts)
    nomination = replace(
        nominator_settings(settings.index),
        dense_min_uncovered=0.0,
        search_timeout_s=5.0,
        embed_timeout_s=5.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        index = QdrantEdgeIndex(nomination.schema(embedder), Path(folder))
        await index.open()
        nominator = Nominator(index, embedder=embedder, settings=nomination)
        tree = DeltaTree.open(None, identity="bench")
        gc.collect()
        before = memory_bytes()
        embedder.replay = True
        for nodes in _batches(_stored(rng, tree, templates, num_stored), 64):
            await nominator.remember_all(
                [
                    PromptRecord(int(node.node_id), NAMESPACE, node.token_ids, PromptText(texts[number], ""))
                    for number, node in nodes
                ]
            )
        embedder.replay = False
        gc.collect()
        per_prompt = {kind: number / num_stored for kind, number in grown(before).items()}
        arms = {}
        for name, dense in (("without_dense", False), ("with_dense", True)):
            arms[name] = await _measure(
                rng, tree, nominator, templates, texts, settings, num_queries=num_queries, dense=dense
            )
        nominator.close()
        await index.close()
    return {
        "benchmark": "plan",
        "stored": num_stored,
        "prompt_tokens": num_tokens,
        "queries": num_queries,
        "seed": seed,
        **arms,
        "p50_ms": arms["without_dense"]["p50_ms"],
        "p99_ms": arms["without_dense"]["p99_ms"],
        "metadata_bytes_per_prompt": per_prompt["RssAnon"],
        "mapped_file_bytes_per_prompt": per_prompt["RssFile"],
    }


async def _measure(
    rng: np.random.Generator,
    tree: DeltaTree,
    nominator: Nominator,
    templates: Sequence[TokenIds],
    texts: Sequence[str],
    settings: Settings,
    *,
    num_queries: int,
    dense: bool,
) -> dict[str, Any]:
    limits = PlannerLimits.from_settings(settings)
    total, stages, saved = [], [], []
    for _ in range(num_queries):
        number = int(rng.integers(len(templates)))
        query = _variant(rng, templates[number])
        began = time.perf_counter()
        nomination = await nominator.nominate(
            NAMESPACE, query, PromptText(texts[number], ""), allow_dense=dense
        )
        nodes = [node for c in nomination.candidates if (node := tree.get(c.prompt_id)) is not None]  # type: ignore[arg-type]  # NodeId
        nominated = time.perf_counter()
        plan = make_plan(query, nodes, tree.segment, approximate=True, limits=limits, rates=RATES)
        total.append(time.perf_counter() - began)
        stages.append(nominated - began)
        saved.append(1 - plan.charged_budget if isinstance(plan, Plan) else 0.0)
    return {
        **milliseconds(total),
        "nomination": milliseconds(stages),
        "saved_fraction": float(np.mean(saved)),
    }


class _Embedder(TextEmbedder):
    """The real embedder; while `replay` is on, known texts get their vector back with some noise."""

    def __init__(self, real: TextEmbedder) -> None:
        self._real = real
        self._known: dict[str, NDArray[np.float32]] = {}
        self._rng = np.random.default_rng(1)
        self.replay = False

    @property
    def name(self) -> str:
        return self._real.name

    @property
    def dimension(self) -> int:
        return self._real.dimension

    def learn(self, texts: Sequence[str]) -> None:
        self._known = dict(zip(texts, self._real.embed(texts), strict=True))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not self.replay:
            return self._real.embed(texts)
        known = np.stack([self._known[text] for text in texts])
        noisy = known + self._rng.normal(0.0, 0.005, known.shape).astype(np.float32)
        vectors: NDArray[np.float32] = noisy / np.linalg.norm(noisy, axis=1, keepdims=True)
        return vectors


def _stored(
    rng: np.random.Generator, tree: DeltaTree, templates: Sequence[TokenIds], num_stored: int
) -> Iterator[tuple[int, Node]]:
    """The templates, then variants as an engine leaves them: with pieces of the template and own segments."""
    bases: list[Node] = []
    for count in range(num_stored):
        number = count % len(templates)
        if count < len(templates):
            node = _insert(tree, templates[number], None)
            bases.append(node)
        else:
            node = _insert(tree, _variant(rng, templates[number]), bases[number])
        yield number, node


def _insert(tree: DeltaTree, tokens: TokenIds, base: Node | None) -> Node:
    """A prompt of which everything, or what differs from `base`, is KV of its own."""
    edges = [0, len(tokens)]
    if base is not None:
        differs = base.token_ids != tokens
        edges = [0, *(np.flatnonzero(np.diff(differs)) + 1).tolist(), len(tokens)]
    pieces: list[Piece] = []
    segments: list[Segment] = []
    for start, end in pairwise(edges):
        if base is not None and base.token_ids[start] == tokens[start]:
            (whole,) = base.pieces
            pieces.append(Piece(whole.segment_id, start, end - start))
            continue
        segments.append(segment(start, end - start, generation=0 if base is None else 1))
        pieces.append(Piece(segments[-1].segment_id, 0, end - start))
    draft = NodeDraft(
        namespace=NAMESPACE,
        token_ids=tokens,
        parent=None if base is None else base.node_id,
        pieces=PieceTable(pieces),
        new_segments=tuple(segments),
        exact_length=len(tokens) if base is None else edges[1],
    )
    return tree.insert(draft).node


def segment(first_position: int, num_tokens: int, *, generation: int) -> Segment:
    return Segment(
        segment_id=new_segment_id(),
        namespace=NAMESPACE,
        first_position=first_position,
        num_tokens=num_tokens,
        generation=generation,
        num_bytes=num_tokens * RATES.bytes_per_token,
        checksum=0,
    )


def _variant(rng: np.random.Generator, template: TokenIds) -> TokenIds:
    return edited(
        template,
        changed=_CHANGED,
        edits=_EDITS,
        draw=lambda length: random_prompt(rng, length, _VOCAB_SIZE),
    )


def _text(rng: np.random.Generator) -> str:
    """A page of words that no other template has in this order."""
    words = ("report", "value", "patient", "street", "order", "late", "invoice", "exam", "red", "sum", "cat")
    return " ".join(rng.choice(words, 120).tolist())


def _batches(items: Iterator[tuple[int, Node]], size: int) -> Iterator[list[tuple[int, Node]]]:
    batch: list[tuple[int, Node]] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
