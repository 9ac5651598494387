"""
`kvshare bench plan`: nomination + alignment + planning for a prompt, over many stored ones, without any
model.

The store holds variants of a few hundred templates, so a query has good donors among many strangers. Meaning
vectors of stored prompts are noisy copies of their template's (embedding all would take minutes and is not
what is measured); the query's text is really embedded in the `with_dense` arm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import DeltaTree
from kvshare.bench.counted_store import NAMESPACE, CountedStore, Variants, nomination_s
from kvshare.bench.figures import grown, memory_bytes, per_prompt, percentiles
from kvshare.index_factory import nominator_settings
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import Plan
from vector_index import Embedder, PromptRecord, PromptText

_TEMPLATES = 200


async def run(
    *, stored: int = 10_000, prompt_tokens: int = 2000, queries: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Times of `queries` new variants against `stored` prompts; memory of what was stored for each."""
    rng = np.random.default_rng(seed)
    embedder = _Embedder()
    texts = [_text(rng) for _ in range(min(_TEMPLATES, stored))]
    embedder.learn(texts)
    nomination = replace(
        nominator_settings(load_settings().index),
        dense_min_uncovered=0.0,
        search_timeout_s=5.0,
        embed_timeout_s=5.0,
    )
    store = CountedStore(DeltaTree.open(None, identity="bench"))
    store.limits = replace(store.limits, dense_min_prefill_s=0.0)
    async with store.sharing(nomination, embedder) as sharing:
        before = memory_bytes()
        variants = Variants(rng, store, num_templates=len(texts), num_tokens=prompt_tokens)
        embedder.replay = True
        await sharing.nominator.remember_all(_stored(store, variants, texts, stored))
        embedder.replay = False
        memory = per_prompt(grown(before), stored)
        arms = {}
        for name, dense in (("without_dense", False), ("with_dense", True)):
            arms[name] = await _measure(sharing, variants, texts, queries, dense=dense)
    return {
        **arms,
        "p50_ms": arms["without_dense"]["p50_ms"],
        "p99_ms": arms["without_dense"]["p99_ms"],
        **memory,
    }


def _stored(
    store: CountedStore, variants: Variants, texts: Sequence[str], num_stored: int
) -> Iterator[PromptRecord]:
    """The templates, then variants of them, each kept when it is its turn."""
    for text, node in zip(texts, variants.templates, strict=True):
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(text, ""))
    for _ in range(num_stored - len(texts)):
        variant = variants.draw()
        node = store.keep(variant.tokens, variant.plan)
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(texts[variant.number], ""))


async def _measure(
    sharing: Sharing, variants: Variants, texts: Sequence[str], num_queries: int, *, dense: bool
) -> dict[str, Any]:
    total, nomination, saved = [], [], []
    for _ in range(num_queries):
        variant = variants.draw()
        prompt = Prompt(variant.tokens, PromptText(texts[variant.number], ""))
        began = time.perf_counter()
        lookup = await sharing.find_plan(NAMESPACE, prompt, SharingMode.APPROX, by_meaning=dense)
        total.append(time.perf_counter() - began)
        nomination.append(nomination_s(lookup))
        saved.append(1 - lookup.plan.charged_budget if isinstance(lookup.plan, Plan) else 0.0)
    return {
        **percentiles(total),
        "nomination": percentiles(nomination),
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


def _text(rng: np.random.Generator) -> str:
    """A page of words that no other template has in this order."""
    words = ("report", "value", "patient", "street", "order", "late", "invoice", "exam", "red", "sum", "cat")
    return " ".join(rng.choice(words, 120).tolist())
