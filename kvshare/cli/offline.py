"""`kvshare explain` without a server: the plan that a prompt would get from a stopped store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_tree import DeltaTree, DeltaTreeError, NodeId, TokenIds, common_prefix_length
from kvshare.errors import StoreError
from kvshare.metadata import METADATA_FILE
from kvshare.served_model import find_model
from kvshare.settings import Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import Planning, explanation
from kvshare.sharing.pipeline import Lookup
from kvshare.sharing.planner import PlannerLimits, make_plan
from vector_index import Candidate, fingerprints


def explain_offline(
    store_path: Path, settings: Settings, messages_or_prompt: Sequence[Mapping[str, Any]] | str
) -> dict[str, Any]:
    """
    The plan a prompt would have got from the metadata of a stopped store, were its KV still there.

    Candidates are found by comparing fingerprints with every stored prompt of the largest namespace.
    Raises:  StoreError if the store cannot be read; ModelError, RequestError if the prompt cannot be encoded
    """
    from kvshare.engines.embedded.tokenizer import PromptEncoder  # imports transformers

    encoder = PromptEncoder.load(find_model(settings.model.path).path)
    if isinstance(messages_or_prompt, str):
        prompt = encoder.encode_text(messages_or_prompt)
    else:
        prompt = encoder.encode_chat(messages_or_prompt)
    try:
        tree = DeltaTree.open(store_path / METADATA_FILE, identity=None, read_only=True)
    except DeltaTreeError as exc:
        raise StoreError(str(exc)) from exc
    with tree:
        candidates = _by_fingerprints(tree, prompt.token_ids, settings)
        nodes = [tree.node(NodeId(candidate.prompt_id)) for candidate in candidates]
        limits = PlannerLimits.from_settings(settings)
        rates = CostModel.from_settings(settings.cost, bytes_per_token=0).rates
        planning = Planning(tree.segment, limits, rates, approximate=settings.sharing.mode == "approx")
        plan = make_plan(
            prompt.token_ids,
            nodes,
            tree.segment,
            approximate=planning.approximate,
            limits=limits,
            rates=rates,
        )
        return explanation(Lookup(plan, candidates=candidates), prompt.token_ids, nodes, planning)


def _by_fingerprints(tree: DeltaTree, token_ids: TokenIds, settings: Settings) -> tuple[Candidate, ...]:
    """The stored prompts that share most fingerprints, or the whole beginning, with this one."""
    sizes = Counter(node.namespace for node in tree.nodes())
    if not sizes:
        return ()
    namespace, _ = sizes.most_common(1)[0]
    index = settings.index

    def prints(ids: TokenIds) -> set[int]:
        return set(fingerprints(ids, kgram=index.kgram, window=index.window).tolist())

    wanted = prints(token_ids)
    scored = [
        (len(wanted & prints(node.token_ids)), common_prefix_length(node.token_ids, token_ids), node.node_id)
        for node in tree.nodes(namespace)
    ]
    best = sorted((entry for entry in scored if entry[0] or entry[1] >= index.block_size), reverse=True)
    return tuple(
        Candidate(int(node_id), ("fingerprint",), score / max(1, len(wanted)))
        for score, _, node_id in best[: index.max_candidates]
    )
