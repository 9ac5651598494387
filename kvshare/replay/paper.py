"""
The source paper's figures 2 and 4 on a log of one's own (KVShare, arXiv:2503.16525).

Figure 2: the share of conversations whose first prompt has an identical or similar earlier one (cosine
distance of at most 0.05). Figure 4: of the subset of similar prompts (without duplicates, each with another
similar one), the share of each prompt that is not computed when the subset is replayed in its order.

    OUT/paper.json           the document below; figure-2 and figure-4 next to it, as .svg and .png
    {"schema_version", "kind": "replay-paper", "config", "data",
     "figure_2": {"num_prompts", "max_distance", "shares": {"identical", "similar", "unique"},
                  "by_distance": [{"distance", "share"}]}        share: identical or within the distance
     "figure_4": {"num_prompts", "num_duplicates", "num_tokens",
                  "arms": [{"arm", "token_hit_rate", "edges", "shares", "at_least": {"50", "70", "90"}}]},
     "paper": what the paper reports, "versions", "times"}

A log's first prompts stand for its conversations. Distances depend on the embedder; the paper's is GTE. Each
first prompt is compared with all before it: 100,000 take a minute and a half of one core and 150 MB for 384
floats each, a million two and a half hours and 1.5 GB; embedding them takes longer.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvshare.errors import LogError
from kvshare.replay.measures import DISTANCE_THRESHOLDS, OVERLAP_EDGES, buckets
from kvshare.replay.options import ReplayOptions, Report, describe_log, describe_options, versions
from kvshare.replay.policies import open_policies
from kvshare.replay.policies.base import BatchEmbeddings, Vector, with_room
from kvshare.replay.report.shapes import draw_figure_2, draw_figure_4
from kvshare.replay.requests import TokenizedRequest, batches
from kvshare.replay.results import SCHEMA_VERSION, SHARES, Document
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document, write_whole
from vector_index import TextEmbedder

MAX_DISTANCE: Final = 0.05  # one of `DISTANCE_THRESHOLDS`
PAPER_POLICIES: Final = "prefix,chunks,kvshare,kvshare-open,kvshare-semantic,kvshare-semantic-open,oracle"
_BATCH: Final = 32
_REPORTED: Final = {  # by the source paper (KVShare, arXiv:2503.16525): shares, by figure and log
    "figure_2": {"WildChat-1M": {"identical_or_similar": 0.36}},
    "figure_4": {
        "WildChat-Similar": {"at_least_90": 0.6},
        "ShareGPT-Similar": {"at_least_90": 0.5},
        "LMSYSChat-Similar": {"at_least_90": 0.2},
    },
}


def replay_paper(
    options: ReplayOptions, *, embedder: TextEmbedder | None = None, report: Report = lambda done, total: None
) -> Document:
    """
    Both figures, as a document and drawn, into `options.out`. `options.policies` are figure 4's.

    The log is read twice, and `report` counts the requests of both passes.

    Raises:  LogError, ModelError
    """
    began = time.perf_counter()
    with options.stream(report) as stream:
        tokenizer, embeddings = RequestTokenizer.load(options.tokenizer), options.embeddings(embedder)
        total = len(stream)

        def first_turns(base: int) -> Iterator[list[TokenizedRequest]]:
            """Yield first turns in batches; a batch is reported when the caller is done with it."""
            requests = (one for one in tokenizer.tokenize(stream) if one.logged.turn == 0)
            for batch in batches(requests, _BATCH):
                embeddings.prepare(batch)
                yield batch
                report(base + batch[-1].index + 1, 2 * total)

        neighbours = _Neighbours()
        for batch in first_turns(0):
            neighbours.add([(request, embeddings.of(request)) for request in batch])
        figure_2, chosen = neighbours.figure_2(), neighbours.similar
        subset = ([request for request in batch if request.index in chosen] for batch in first_turns(total))
        figure_4 = _figure_4(subset, options, embeddings)
        report(2 * total, 2 * total)
        config = describe_options(options, tokenizer, embeddings)
    document: Document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "replay-paper",
        "config": {name: config[name] for name in ("arms", "embedder", "limit", "seed", "tokenizer")},
        "data": describe_log(options, stream),
        "figure_2": figure_2,
        "figure_4": {"num_prompts": len(chosen), "num_duplicates": neighbours.num_identical, **figure_4},
        "paper": _REPORTED,
        "versions": versions(),
        "times": {"wall_s": time.perf_counter() - began},
    }
    write_document(options.out / "paper.json", document)
    for name, draw in (("figure_2", draw_figure_2), ("figure_4", draw_figure_4)):
        path, picture = options.out / name.replace("_", "-"), draw(document[name], _REPORTED[name])
        write_whole(path.with_suffix(".svg"), picture.svg.encode())
        write_whole(path.with_suffix(".png"), picture.png)
    return document


class _Neighbours:
    """The distance of each prompt's nearest earlier one, and the prompts with a near one before or after."""

    def __init__(self) -> None:
        self.num_identical = 0
        self.similar: set[int] = set()  # places in the stream of the subset of similar prompts
        self._distances: list[float] = []  # of the prompts that are not duplicates; 2.0: none before
        self._seen: set[bytes] = set()
        self._vectors: dict[str, NDArray[np.float32]] = {}  # of a namespace, with room for more
        self._places: defaultdict[str, list[int]] = defaultdict(list)  # in the stream, of these vectors

    def add(self, prompts: Iterable[tuple[TokenizedRequest, Vector | None]]) -> None:
        """The stream's next prompts, each with its embedding."""
        new: defaultdict[str, dict[int, Vector]] = defaultdict(dict)
        for request, vector in prompts:
            namespace = request.logged.namespace
            own = hashlib.sha256(namespace.encode()).digest()  # of one length, whatever the name
            content = hashlib.sha256(own + request.token_ids.tobytes()).digest()
            if content in self._seen:
                self.num_identical += 1
            elif vector is None:
                self._distances.append(2.0)
            else:
                new[namespace][request.index] = vector
            self._seen.add(content)
        for namespace, vectors in new.items():
            self._compare(namespace, list(vectors), list(vectors.values()))

    def _compare(self, namespace: str, new: Sequence[int], vectors: Sequence[Vector]) -> None:
        places = self._places[namespace]
        before = len(places)
        places += new
        vectors_before = self._vectors.get(namespace, np.zeros((64, len(vectors[0])), np.float32))
        vectors_before = self._vectors[namespace] = with_room(vectors_before, len(places))
        vectors_before[before : len(places)] = vectors
        # One product for all of them: one for each reads all vectors again, and takes several times as long.
        products = vectors_before[before : len(places)] @ vectors_before[: len(places)].T
        for row, (place, likenesses) in enumerate(zip(new, products, strict=True), start=before):
            distances = np.maximum(1.0 - likenesses[:row], 0.0)
            self._distances.append(float(distances.min(initial=2.0)))
            if len(near := np.flatnonzero(distances <= MAX_DISTANCE)):
                self.similar |= {place, *(places[other] for other in near)}

    def figure_2(self) -> Document:
        """Raises LogError if there was no prompt."""
        distances, identical = np.array(self._distances), self.num_identical
        num_prompts = identical + len(distances)
        if not num_prompts:
            raise LogError("--paper: the log has no first turns, or does not say which requests are")
        within = {limit: identical + int((distances <= limit).sum()) for limit in DISTANCE_THRESHOLDS}
        nums = {"identical": identical, "similar": within[MAX_DISTANCE] - identical}
        nums["unique"] = num_prompts - within[MAX_DISTANCE]
        return {
            "num_prompts": num_prompts,
            "max_distance": MAX_DISTANCE,
            "shares": {name: num / num_prompts for name, num in nums.items()},
            "by_distance": [{"distance": limit, "share": num / num_prompts} for limit, num in within.items()],
        }


def _figure_4(
    subset: Iterable[list[TokenizedRequest]], options: ReplayOptions, embeddings: BatchEmbeddings
) -> Document:
    tokens: list[int] = []
    hits: list[list[int]] = []  # of each request, by policy
    with open_policies(options.policies, options.context(embeddings)) as policies:
        for batch in subset:
            tokens += [request.num_tokens for request in batch]
            hits += [[policy.observe(request).num_hit for policy in policies] for request in batch]
    by_policy, num = np.array(hits, np.int64).reshape(-1, len(options.policies)).T, max(1, len(tokens))
    arms = []
    for spec, num_reused in zip(options.policies, by_policy, strict=True):
        rates = num_reused / np.maximum(np.array(tokens, np.int64), 1)
        shares = np.bincount(buckets(OVERLAP_EDGES, rates), minlength=len(OVERLAP_EDGES)) / num
        arms.append(
            {
                "arm": spec.text,
                "token_hit_rate": int(num_reused.sum()) / max(1, sum(tokens)),
                "edges": list(OVERLAP_EDGES),
                "shares": shares.tolist(),
                "at_least": {str(share): int((100 * rates >= share).sum()) / num for share in SHARES},
            }
        )
    return {"num_tokens": sum(tokens), "arms": arms}
