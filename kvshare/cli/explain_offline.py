"""`kvshare explain` without a server: the plan that a prompt would get from a stopped store."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from delta_tree import DeltaTree, Node
from kvshare.cli.output import note
from kvshare.conversation.chat import Chat
from kvshare.errors import StoreError
from kvshare.extras import require
from kvshare.kv.tier import EverySegment
from kvshare.metadata import METADATA_FILE, opened
from kvshare.requests import Prompt, SharingMode
from kvshare.rules.rewrite import apply_rules
from kvshare.rules.texts import CHAT
from kvshare.served_index import nominator_settings
from kvshare.served_model import find_model
from kvshare.settings import IndexSettings, Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.keeper import PromptKeeper
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.pipeline import Sharing
from kvshare.tenants import Tenants
from vector_index import Nominator, PromptRecord, QdrantEdgeIndex, VectorIndexError

_NO_TIMEOUT_S = 3600.0  # no request waits for this search
_TOKENS_PER_S = 5_000_000  # that one core indexes
_BATCH = 256


def explain_offline(
    store_path: Path, settings: Settings, messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """
    Return the plan that a prompt would get if the prompts of a stopped store still had their KV.

    It searches the largest namespace by equal prefixes and fingerprints. The store has no texts, so that no
    donor is nominated by embedding. Prefill and load speeds are those of config.yaml. The store is unchanged.

    Raises:  MissingExtraError; StoreError if the store cannot be read, or there is no room for an index of it
             in the temporary folder; ModelError, RequestError if the prompt cannot be encoded
    """
    require("embedded", what="`kvshare explain` on a stopped store", embeds=False)
    from kvshare.embedded.stored_model import may_move_keys, stored_fingerprint
    from kvshare.embedded.tokenizer import PromptEncoder

    model_path = find_model(settings.model.path).path
    rewritten = apply_rules(settings.rules, {"messages": list(messages)}, CHAT)
    prompt = PromptEncoder.load(model_path).encode_chat(Chat(tuple(rewritten.body["messages"])))
    limits = PlannerLimits.from_settings(
        settings,
        fingerprint=stored_fingerprint(model_path),  # that the model would have when served
        can_move_keys=may_move_keys(model_path),
        can_probe=True,
    )
    tenants = Tenants()
    tenants.load(store_path)
    with opened(store_path / METADATA_FILE, read_only=True) as tree:
        sizes = Counter(node.namespace for node in tree.nodes())
        namespace = sizes.most_common(1)[0][0] if sizes else ""
        document = asyncio.run(_explain(tree, namespace, prompt, settings, limits))
    owner = tenants.owner_of(namespace)
    whom = None if owner is None else {"tenant": owner.tenant, "key": owner.key}
    return {**document, "planned_for": whom, "rules": list(rewritten.rules)}


async def _explain(
    tree: DeltaTree, namespace: str, prompt: Prompt, settings: Settings, limits: PlannerLimits
) -> dict[str, Any]:
    nodes = tree.nodes(namespace)
    bytes_per_token = max((round(entry.bytes_per_token) for entry in tree.segments(namespace)), default=0)
    async with _nominator_of(nodes, settings.index) as nominator:
        sharing = Sharing(
            keeper=PromptKeeper(tree, EverySegment(), min_tokens=1),
            nominator=nominator,
            limits=limits,
            cost=CostModel.from_settings(settings.cost, bytes_per_token=bytes_per_token),
        )
        mode = SharingMode(settings.sharing.mode)
        lookup = await sharing.find_plan(namespace, prompt, mode)
        sharing.close()
    return explain_lookup(sharing, prompt, lookup, mode)


@asynccontextmanager
async def _nominator_of(nodes: Sequence[Node], settings: IndexSettings) -> AsyncIterator[Nominator]:
    """A nominator that knows these nodes, over an index in a temporary folder."""
    seconds = sum(len(node.token_ids) for node in nodes) / _TOKENS_PER_S
    if seconds > 1:
        note(f"indexing {len(nodes):,} stored prompts first: about {seconds:.0f} s")
    chosen = replace(
        nominator_settings(settings), search_timeout_s=_NO_TIMEOUT_S, write_timeout_s=_NO_TIMEOUT_S
    )
    index = QdrantEdgeIndex(chosen.schema(None))
    nominator = Nominator(index, settings=chosen)
    try:
        await index.open()
        records = (PromptRecord(node.node_id, node.namespace, node.token_ids) for node in nodes)
        failures = await nominator.remember_all(records, _BATCH)
        if failures or nominator.num_waiting:
            problem = failures[0].reason if failures else index.why_paused()
            raise StoreError(f"the stored prompts cannot be indexed in the temporary folder: {problem}")
        yield nominator
    except VectorIndexError as exc:
        raise StoreError(f"the stored prompts cannot be indexed in the temporary folder: {exc}") from exc
    finally:
        nominator.close()
        await index.close()
