"""
`kvshare bench plan`: nomination + alignment + planning for a prompt, over many stored ones, without any
model.

The store holds variants of a few hundred templates, so a query has good donors among many strangers. Meaning
vectors of stored prompts are noisy copies of their template's (embedding all would take minutes and is not
what is measured); the query's text is really embedded in the `with_dense` arm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    Piece,
    PieceTable,
    Segment,
    Span,
    TokenIds,
    gaps,
    new_segment_id,
)
from kvshare.bench.figures import MemoryPerPrompt
from kvshare.bench.harness import edited, milliseconds, random_prompt
from kvshare.index_factory import nominator_settings
from kvshare.settings import load_settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import Plan
from kvshare.sharing.planner import PlannerLimits, make_plan
from vector_index import (
    Embedder,
    Nominator,
    NominatorSettings,
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


async def run(
    *, stored: int = 10_000, prompt_tokens: int = 2000, queries: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Times of `queries` new variants against `stored` prompts; memory of what was stored for each."""
    rng = np.random.default_rng(seed)
    settings = load_settings()
    limits = PlannerLimits.from_settings(settings)
    templates = [random_prompt(rng, prompt_tokens, _VOCAB_SIZE) for _ in range(_TEMPLATES)]
    embedder = _Embedder()
    texts = [_text(rng) for _ in templates]
    embedder.learn(texts)
    nomination = replace(
        nominator_settings(settings.index),
        dense_min_uncovered=0.0,
        search_timeout_s=5.0,
        embed_timeout_s=5.0,
    )
    async with open_nominator(nomination, embedder) as nominator:
        tree = DeltaTree.open(None, identity="bench")
        memory = MemoryPerPrompt(stored)
        embedder.replay = True
        await nominator.remember_all(
            PromptRecord(int(node.node_id), NAMESPACE, node.token_ids, PromptText(texts[number], ""))
            for number, node in _stored(rng, tree, templates, stored)
        )
        embedder.replay = False
        per_prompt = memory.figures()
        arms = {}
        for name, dense in (("without_dense", False), ("with_dense", True)):
            asked = _queries(rng, templates, texts, queries)
            arms[name] = await _measure(tree, nominator, limits, asked, dense=dense)
    return {
        "benchmark": "plan",
        "stored": stored,
        "prompt_tokens": prompt_tokens,
        "queries": queries,
        "seed": seed,
        **arms,
        "p50_ms": arms["without_dense"]["p50_ms"],
        "p99_ms": arms["without_dense"]["p99_ms"],
        **per_prompt,
    }


@asynccontextmanager
async def open_nominator(
    settings: NominatorSettings, embedder: TextEmbedder | None = None
) -> AsyncIterator[Nominator]:
    """Over a new index in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        index = QdrantEdgeIndex(settings.schema(embedder), Path(folder))
        await index.open()
        nominator = Nominator(index, embedder=embedder, settings=settings)
        try:
            yield nominator
        finally:
            nominator.close()
            await index.close()


def _queries(
    rng: np.random.Generator, templates: Sequence[TokenIds], texts: Sequence[str], num_queries: int
) -> Iterator[tuple[TokenIds, PromptText]]:
    for _ in range(num_queries):
        number = int(rng.integers(len(templates)))
        yield _variant(rng, templates[number]), PromptText(texts[number], "")


async def _measure(
    tree: DeltaTree,
    nominator: Nominator,
    limits: PlannerLimits,
    queries: Iterable[tuple[TokenIds, PromptText]],
    *,
    dense: bool,
) -> dict[str, Any]:
    total, stages, saved = [], [], []
    for query, text in queries:
        began = time.perf_counter()
        nomination = await nominator.nominate(NAMESPACE, query, text, allow_dense=dense)
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


class _Embedder(Embedder):
    """While `replay` is on, known texts get their vector back with some noise."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, NDArray[np.float32]] = {}
        self._rng = np.random.default_rng(1)
        self.replay = False

    def learn(self, texts: Sequence[str]) -> None:
        self._known = dict(zip(texts, super().embed(texts), strict=True))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not self.replay:
            return super().embed(texts)
        known = np.stack([self._known[text] for text in texts])
        noisy = known + self._rng.normal(0.0, 0.005, known.shape).astype(np.float32)
        vectors: NDArray[np.float32] = noisy / np.linalg.norm(noisy, axis=1, keepdims=True)
        return vectors


def _stored(
    rng: np.random.Generator, tree: DeltaTree, templates: Sequence[TokenIds], num_stored: int
) -> Iterator[tuple[int, Node]]:
    """The templates, then variants as an engine leaves them: with pieces of the template and own segments."""
    bases = []
    for number, template in enumerate(templates[:num_stored]):
        bases.append(insert(tree, template))
        yield number, bases[-1]
    for count in range(len(templates), num_stored):
        number = count % len(templates)
        base, tokens = bases[number], _variant(rng, templates[number])
        (whole,) = base.pieces
        edges = [0, *(np.flatnonzero(np.diff(base.token_ids != tokens)) + 1).tolist(), len(tokens)]
        kept = [
            (start, Piece(whole.segment_id, start, end - start))
            for start, end in pairwise(edges)
            if base.token_ids[start] == tokens[start]
        ]
        yield number, insert(tree, tokens, base, kept, exact_length=edges[1], generation=1)


def insert(
    tree: DeltaTree,
    tokens: TokenIds,
    base: Node | None = None,
    kept: Sequence[tuple[int, Piece]] = (),
    *,
    exact_length: int | None = None,
    generation: int = 0,
) -> Node:
    """A prompt as an engine leaves it: pieces of `base`, each with its position, and segments of its own."""
    exact_length = len(tokens) if exact_length is None else exact_length
    own = {
        span.start: Segment(
            segment_id=new_segment_id(),
            namespace=NAMESPACE,
            first_position=span.start,
            num_tokens=len(span),
            generation=generation if span.start >= exact_length else 0,
            num_bytes=len(span) * RATES.bytes_per_token,
            checksum=0,
        )
        for span in gaps((Span(start, start + piece.length) for start, piece in kept), len(tokens))
    }
    parts = [*kept, *((start, Piece(new.segment_id, 0, new.num_tokens)) for start, new in own.items())]
    pieces = PieceTable(piece for _, piece in sorted(parts, key=lambda part: part[0]))
    parent = None if base is None else base.node_id
    return tree.insert(NodeDraft(NAMESPACE, tokens, parent, pieces, tuple(own.values()), exact_length)).node


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
