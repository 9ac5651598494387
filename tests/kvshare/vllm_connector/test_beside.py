"""Beside another connector in one vLLM: each does its part, and neither gives away what is not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.starts import starts

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Start, Texts, Vllm

LIMIT = 1e-4
BLOCK = 128  # tokens of one of vLLM's blocks on a CPU
KEEPER = {
    "kv_connector": "BlockKeeper",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvshare_lab.vllm.block_keeper",
}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def ours(**settings: Any) -> dict[str, Any]:
    """Our child of an outer connector."""
    own = {"control_port": 0, "max_bytes": 1 << 28, **settings}
    return {
        "kv_connector": "KVShareConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvshare": own},
    }


def outer(*children: dict[str, Any], name: str = "KVShareMultiConnector") -> dict[str, Any]:
    """Settings of vLLM, as `kvshare vllm --beside` gives them."""
    return {"kv_connector": name, "kv_connector_extra_config": {"connectors": list(children)}}


BESIDE = {"kv_transfer_config": outer(ours(by_block_hash=["BlockKeeper"]), KEEPER)}


@pytest.fixture(
    params=[
        pytest.param(False, marks=starts(**BESIDE), id="in step"),
        pytest.param(True, marks=starts(**BESIDE, async_scheduling=True), id="async"),
    ]
)
def vllm(vllm: Vllm, request: pytest.FixtureRequest) -> Vllm:
    from kvshare_lab.vllm.block_keeper import BlockKeeper

    BlockKeeper.forget()
    info = vllm.side.info()
    assert (info.refusals, info.settings["async_scheduling"]) == ((), request.param)
    return vllm


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_shared_answers_are_the_plain_ones(vllm: Vllm, text: Texts, copies: Copies, max_tokens: int) -> None:
    """Both save at the end of a request, and its blocks stay until both have; the next load is ours."""
    tokens = text(600, 1)
    donor = vllm.store(tokens)
    assert sum(segment.length for segment in donor.stored) == 600 + 3
    answer, event = vllm.shared(tokens, copies(donor, (0, 100), (130, 590)), max_tokens=max_tokens)
    assert (event.decision, event.reason, event.num_computed) == ("approx", None, 40)
    assert answer.distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT


def test_the_other_one_loads_what_ours_has_not(vllm: Vllm, text: Texts) -> None:
    """A prompt without a ticket, whose blocks vLLM has given away."""
    from kvshare_lab.vllm.block_keeper import BlockKeeper

    tokens, salt = text(600, 2), vllm.fresh("tenant")
    (first,) = vllm.ask((tokens, None, salt))
    assert vllm.llm.reset_prefix_cache()
    (again,) = vllm.ask((tokens, None, salt))
    assert BlockKeeper.num_loaded == 600 // BLOCK
    assert again.distance(first) <= LIMIT


def test_exact_kv_comes_from_either(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Ours loads a prompt with a ticket, as it stands first."""
    from kvshare_lab.vllm.block_keeper import BlockKeeper

    tokens, salt = text(600, 3), vllm.fresh("tenant")
    donor = vllm.store(tokens)
    vllm.forget_blocks()
    ticket = vllm.ticket(tokens, copies(donor, (0, 590)), exact_length=590)
    (answer,) = vllm.ask((tokens, ticket, salt))
    assert vllm.finished(ticket).num_computed == 10
    assert not BlockKeeper.num_loaded
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


def test_what_the_other_one_keeps_of_approximate_kv_nobody_finds(
    vllm: Vllm, text: Texts, copies: Copies
) -> None:
    """KV of another text is kept under the hashes of a salt that is used once."""
    from kvshare_lab.vllm.block_keeper import BlockKeeper

    donor, tokens = vllm.store(text(600, 4)), text(600, 5)
    num_kept = len(BlockKeeper.kept)
    wrong, _ = vllm.shared(tokens, copies(donor, (0, 580)))
    assert len(BlockKeeper.kept) >= num_kept + 4  # it was kept
    truth = vllm.plain(tokens)
    assert wrong.logprobs[0] != truth.logprobs[0]  # and is wrong
    assert vllm.llm.reset_prefix_cache()
    for salt in (None, vllm.fresh("tenant")):
        (answer,) = vllm.ask((tokens, None, salt))
        assert answer.distance(truth) <= LIMIT


@pytest.mark.parametrize(
    ("connectors", "word"),
    [
        (outer(ours(), KEEPER), "BlockKeeper next to KVShare is not supported"),
        (outer(ours() | RECOMPUTE, name="MultiConnector"), "take KVShareMultiConnector"),
    ],
)
def test_where_it_is_not_safe_nothing_is_shared(
    start: Start, text: Texts, connectors: dict[str, Any], word: str
) -> None:
    """One that might find KV by its tokens alone; and vLLM's own outer connector. It is said why."""
    machine = start("llama", kv_transfer_config=connectors)
    assert any(word in refusal for refusal in machine.side.info().refusals)
    tokens = text(300)
    assert len(machine.ask((tokens, machine.ticket(tokens), None))[0].tokens) == 4


def test_ours_comes_first() -> None:
    """The first child that has KV of a request loads it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvshare.vllm_connector.beside import KVShareMultiConnector
    from tests.kvshare.vllm_connector.test_config import config

    settings = config()
    settings.kv_transfer_config = KVTransferConfig(kv_role="kv_both", **outer(KEEPER))
    with pytest.raises(ValueError, match=r"must be the first.*found BlockKeeper"):
        KVShareMultiConnector(settings, KVConnectorRole.WORKER, None)
