"""
`kvshare bench plan`: time to find donors for a prompt, align and plan, among many stored ones; no model.

The store holds variants of 200 templates, so a query has good donors among many unrelated prompts. Embeddings
of stored prompts are those of their templates with some noise, as embedding all of them would take minutes.
The query's text is really embedded, in the arm `with_dense`.
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
_WORDS = ("report", "value", "patient", "street", "order", "late", "invoice", "exam", "red", "sum", "cat")


async def run(
    *, stored: int = 10_000, prompt_tokens: int = 2000, queries: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Times of `queries` new variants among `stored` prompts, and the memory for each stored prompt."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(_WORDS, 120).tolist()) for _ in range(min(_TEMPLATES, stored))]
    embedder = _Embedder(texts)
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
        arms = {
            name: await _measure(sharing, variants, texts, queries, dense=dense)
            for name, dense in (("without_dense", False), ("with_dense", True))
        }
    return {**arms, **{name: arms["without_dense"][name] for name in ("p50_ms", "p99_ms")}, **memory}


def _stored(
    store: CountedStore, variants: Variants, texts: Sequence[str], num_stored: int
) -> Iterator[PromptRecord]:
    """The templates, then variants of them; each variant is stored when it is asked for."""
    for text, node in zip(texts, variants.templates, strict=True):
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(text, ""))
    for _ in range(num_stored - len(texts)):
        variant = variants.draw()
        node = store.store(variant.tokens, variant.plan)
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(texts[variant.number], ""))


async def _measure(
    sharing: Sharing, variants: Variants, texts: Sequence[str], num_queries: int, *, dense: bool
) -> dict[str, Any]:
    total, nomination, saved = [], [], []  # seconds, seconds, shares of the prompt
    for _ in range(num_queries):
        variant = variants.draw()
        prompt = Prompt(variant.tokens, PromptText(texts[variant.number], ""))
        began = time.perf_counter()
        lookup = await sharing.find_plan(NAMESPACE, prompt, SharingMode.APPROX, by_embedding=dense)
        total.append(time.perf_counter() - began)
        nomination.append(nomination_s(lookup))
        saved.append(1 - lookup.plan.charged_budget if isinstance(lookup.plan, Plan) else 0.0)
    return {
        **percentiles(total),
        "nomination": percentiles(nomination),
        "saved_fraction": float(np.mean(saved)),
    }


class _Embedder(Embedder):
    """While `replay` is on, the templates' texts get their own embeddings with some noise."""

    replay = False

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._known = dict(zip(texts, self.embed(texts), strict=True))
        self._rng = np.random.default_rng(1)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not self.replay:
            return super().embed(texts)
        known = np.stack([self._known[text] for text in texts])
        noisy = known + self._rng.normal(0.0, 0.005, known.shape).astype(np.float32)
        vectors: NDArray[np.float32] = noisy / np.linalg.norm(noisy, axis=1, keepdims=True)
        return vectors
