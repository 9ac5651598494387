"""What the index learns of prompts that are evicted or shortened meanwhile."""

from typing import ClassVar

from delta_tree import NodeId, TokenIds
from kvshare.embedded.model import EmbeddedModel
from kvshare.reasons import Reason
from kvshare.sharing.plan import NoPlan
from tests.kvshare.sharing.tiny_sharing import TEXT, FixedNominator, look_up, prompt, sharing_with, store
from vector_index import (
    PromptText,
)


async def test_a_prompt_evicted_while_it_is_indexed_does_not_come_back(model: EmbeddedModel) -> None:
    """Embedding takes its time; what was evicted meanwhile leaves the index again."""

    class SlowNominator(FixedNominator):
        async def remember(self, *arguments: object, **more: object) -> tuple[()]:
            sharing.tier.drop(sharing.tree.evict(node.node_id).freed_segments)
            self.events.append("remember")
            return ()

        async def forget(self, namespace: str, prompt_ids: object) -> tuple[()]:
            self.events.append(f"forget {prompt_ids == [node.node_id]}")
            return ()

        events: ClassVar[list[str]] = []

    nominator = SlowNominator()
    sharing = sharing_with(nominator, model)
    kept = store(sharing, model, prompt(100).token_ids)
    assert kept is not None
    node = kept
    await sharing.indexing.remember(node, TEXT)
    assert nominator.events == ["remember", "forget True"]


async def test_the_index_hears_of_a_prompt_that_lost_its_end(model: EmbeddedModel) -> None:
    """It is found by what is left of it, also where its text was still waiting to be embedded."""
    remembered: list[tuple[int, object]] = []

    class Recorder(FixedNominator):
        async def remember(
            self, prompt_id: int, namespace: str, token_ids: TokenIds, prompt_text: PromptText | None = None
        ) -> tuple[()]:
            remembered.append((len(token_ids), prompt_text))
            return ()

    sharing = sharing_with(Recorder(), model, max_bytes=1000 * model.layout.bytes_per_token)
    node = store(sharing, model, prompt(900).token_ids)
    assert node is not None
    assert store(sharing, model, prompt(200, seed=1).token_ids) is not None
    assert sharing.tree.node(node.node_id).num_tokens < 900
    await sharing.indexing.forget_evicted()
    await sharing.indexing.remember(node, TEXT)
    assert remembered == 2 * [(sharing.tree.node(node.node_id).num_tokens, None)]


async def test_a_prompt_that_loses_its_end_while_it_is_embedded_is_indexed_short(
    model: EmbeddedModel,
) -> None:
    """What the index got last is what the tree has."""
    remembered: list[tuple[int, object]] = []

    class Slow(FixedNominator):
        async def remember(
            self, prompt_id: int, namespace: str, token_ids: TokenIds, prompt_text: PromptText | None = None
        ) -> tuple[()]:
            remembered.append((len(token_ids), prompt_text))
            if prompt_text is not None:
                sharing.tree.shorten(NodeId(prompt_id), 256)
            return ()

    sharing = sharing_with(Slow(), model)
    node = store(sharing, model, prompt(900).token_ids)
    assert node is not None
    await sharing.indexing.remember(node, TEXT)
    assert remembered == [(900, TEXT), (256, None)]


async def test_an_index_entry_without_a_node_is_taken_out(model: EmbeddedModel) -> None:
    """Entries that nobody knows would crowd out living donors."""
    sharing = sharing_with(FixedNominator(77), model)
    assert (await look_up(sharing, prompt(100))).plan == NoPlan(Reason.NO_CANDIDATES)
    assert sharing.keeper.take_evicted() == [("ns", 77)]
