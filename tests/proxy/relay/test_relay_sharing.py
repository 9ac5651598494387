"""Plans for vLLM: what a ticket says, what becomes of it, and whose KV it never names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.vllm_protocol.messages import digest_of
from kvshare.vllm_protocol.salts import private_salt
from tests.fake_vllm import FakeVllm, covered
from tests.proxy.conftest import eventually, key_of, key_settings
from tests.proxy.relay.relay_server import FORM, LOCAL_SALT, Relay, chat_body, running_relay


async def test_a_first_prompt_is_kept_as_a_donor(relay: Relay, vllm: FakeVllm) -> None:
    """Its ticket has no copies; the node has the prompt's tokens and the answer's."""
    await relay.chat("Rome")
    (seen,) = vllm.generated
    tokens = vllm.tokens_of(seen.body)
    (ticket,) = vllm.tickets
    assert (ticket.copies, ticket.store, ticket.num_tokens) == ((), True, len(tokens))
    assert ticket.prompt_digest == digest_of(tokens)
    assert seen.body["cache_salt"] == LOCAL_SALT
    (node,) = relay.engine.sharing.tree.nodes()
    assert node.token_ids.tolist() == tokens + list(vllm.behaviour.answer.encode())
    assert node.exact_length == node.num_tokens
    assert node.pieces.segment_ids == vllm.segments.keys()


async def test_an_edited_prompt_is_planned_from_its_donor(relay: Relay, vllm: FakeVllm) -> None:
    """Copies with the same tokens, under a salt of its own; vLLM is told what to report as cached."""
    await relay.chat("Rome")
    await relay.chat("Reykjavik", stream=True)
    first, second = vllm.tickets
    body = vllm.generated[1].body
    tokens = vllm.tokens_of(body)
    assert not second.is_exact
    assert second.namespace == first.namespace
    for copy in second.copies:
        _, stored = vllm.segments[copy.segment_id]
        assert (
            list(stored[copy.offset : copy.offset + copy.length])
            == tokens[copy.target.start : copy.target.end]
        )
    assert body["cache_salt"] == private_salt(second.ticket_id)
    params = body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_prefill_cached_tokens"] == sum(len(span) for span in covered(second))
    assert relay.counts.executions[Decision.APPROX, Decision.APPROX, None] == 1


async def test_what_was_kept_of_a_plan_is_a_node_over_the_donors_segments(relay: Relay) -> None:
    """Only what was computed has segments of its own; behind the first copy nothing counts as exact."""
    await relay.chat("Rome")
    await relay.chat("Reykjavik")
    tree = relay.engine.sharing.tree
    donor, node = tree.nodes()
    assert tree.ancestors(node.node_id) == (donor.node_id,)
    assert node.exact_length < node.num_tokens
    prompt_segment, answer_segment = (segment_id for _, segment_id, _, _ in donor.pieces.rows())
    assert prompt_segment in node.pieces.segment_ids
    assert answer_segment not in node.pieces.segment_ids
    assert {tree.segment(entry).generation for entry in node.pieces.segment_ids} == {0, 1}


async def test_an_equal_beginning_is_exact_and_keeps_the_owners_salt(relay: Relay, vllm: FakeVllm) -> None:
    """vLLM's own prefix caching goes on working, and its own count of cached tokens is right."""
    await relay.chat("Rome", kvshare={"mode": "exact"})
    await relay.chat("Rome and Venice", kvshare={"mode": "exact"})
    await relay.send("/v1/completions", {"prompt": FORM * 2, "kvshare": {"mode": "exact"}})
    await eventually(lambda: relay.num_nodes == 3)
    await relay.send("/v1/completions", {"prompt": FORM * 2 + " And more.", "kvshare": {"mode": "exact"}})
    seen, ticket = vllm.generated[-1], vllm.tickets[-1]
    assert ticket.copies
    assert ticket.is_exact
    assert ticket.exact_length == len((FORM * 2).encode())
    assert seen.body["cache_salt"] == LOCAL_SALT
    assert set(seen.body["kv_transfer_params"]) == {"kvshare"}


@pytest.mark.parametrize(
    ("extra", "headers"),
    [({"kvshare": {"mode": "off"}}, {}), ({}, {"Cache_Control": "no-cache"}), ({"model": "other"}, {})],
)
async def test_what_is_not_to_be_shared_has_no_ticket(
    relay: Relay, vllm: FakeVllm, extra: dict[str, object], headers: dict[str, str]
) -> None:
    """Neither plan nor leave to keep; its owner's salt all the same."""
    await relay.chat("Rome")
    response = await relay.send("/v1/chat/completions", chat_body("Oslo", **extra), **headers)
    assert response.status == 200
    seen = vllm.generated[-1]
    assert seen.ticket is None
    assert seen.body["cache_salt"] == LOCAL_SALT
    assert relay.num_nodes == 1


async def test_no_store_is_planned_and_not_kept(relay: Relay, vllm: FakeVllm) -> None:
    """It takes, and gives nothing; without a donor it has no ticket at all."""
    await relay.chat("Oslo", kvshare={"no_store": True})
    assert vllm.tickets == []
    await relay.chat("Rome")
    await relay.chat("Oslo", kvshare={"no_store": True})
    assert vllm.tickets[-1].copies
    assert not vllm.tickets[-1].store
    assert relay.num_nodes == 1


async def test_tokens_as_a_prompt_need_no_tokenizer(relay: Relay, vllm: FakeVllm) -> None:
    """They are planned as they are."""
    await relay.send("/v1/completions", {"prompt": list(FORM.encode())})
    assert vllm.tickets[0].prompt_digest == digest_of(list(FORM.encode()))


async def test_tenants_never_meet(vllm: FakeVllm, tmp_path: Path) -> None:
    """Another namespace, another salt, and no ticket ever names a segment of another owner."""
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        for name in ("alice", "bob", "carol", "dave", "eve", "alice", "eve"):
            await relay.chat(name, key=key_of(name))
        by_name = dict(zip(("alice", "bob", "carol", "dave", "eve"), vllm.tickets, strict=False))
        assert by_name["alice"].namespace == by_name["bob"].namespace
        assert len({ticket.namespace for ticket in by_name.values()}) == 4
        for ticket in vllm.tickets:
            for copy in ticket.copies:
                assert vllm.segments[copy.segment_id][0] == ticket.namespace
        assert by_name["bob"].copies
        assert not by_name["carol"].copies
        assert not by_name["eve"].copies
        salts = {
            seen.body["cache_salt"] for seen in vllm.generated if not (seen.ticket and seen.ticket.copies)
        }
        assert len(salts) == 4
        assert relay.counts.num_isolation_denials == 0


@pytest.mark.parametrize("tokens", [[2**40] * 100, [-1] * 100, ["x"], None])
async def test_tokens_that_are_none_cost_the_plan_only(relay: Relay, vllm: FakeVllm, tokens: object) -> None:
    """Whatever `/tokenize` says, the request is served."""
    vllm.tokens_of = lambda body: tokens  # type: ignore[method-assign, assignment, return-value]  # rubbish
    response = await relay.send("/v1/chat/completions", chat_body("Rome"))
    assert response.status == 200
    assert vllm.generated[0].ticket is None
    assert relay.counts.unshared[Reason.NOT_TOKENIZED] == 1


async def test_rates_are_learnt_from_what_happened(relay: Relay) -> None:
    """A prefill of its own by the time to the first byte; loads by the stages of the journal."""
    before = relay.engine.sharing.cost.rates
    await relay.chat("Rome", stream=True)
    after_full = relay.engine.sharing.cost.rates
    assert after_full.full_s(100) != before.full_s(100)
    await relay.chat("Oslo")
    assert relay.engine.sharing.cost.rates.loads != after_full.loads
    stats = await (await relay.send("/admin/stats", method="GET")).json()
    assert stats["costs"]["token_s"] == relay.engine.sharing.cost.rates.token_s
    assert stats["costs"]["break_even_tokens"] is None or stats["costs"]["break_even_tokens"] >= 0
