"""A vLLM that has LoRA adapters or takes embeddings: what the base model computes from tokens is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshare.vllm_connector.scheduler.request_state import State
from kvshare.vllm_protocol.messages import Ticket
from kvshare.vllm_protocol.salts import private_salt
from tests.kvshare.vllm_connector.starts import starts

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
RANK = 8

# With room for one adapter, and prompts that may come as embeddings.
pytestmark = starts(enable_lora=True, max_lora_rank=RANK, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the tiny Llama that changes its answers."""
    import torch
    from safetensors.torch import save_file

    folder, generator = tmp_path_factory.mktemp("adapter"), torch.Generator().manual_seed(5)
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(document), encoding="utf-8")
    weights = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, 128, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


# vLLM 0.32's CPU kernels give the base model's rows an adapter where a batch has both, without KVShare, too.
# So no answer of the base model is compared here whose tail was in one batch with an adapter.


def test_the_base_model_is_shared_after_an_adapter(
    vllm: Vllm, text: Texts, copies: Copies, adapter: Path
) -> None:
    """And what the adapter computes is neither shared nor stored."""
    from vllm.lora.request import LoRARequest

    assert vllm.side.info().refusals == ()
    lora, tokens, others = LoRARequest("other", 1, str(adapter)), text(600), text(700, 1)
    plain, donor, ticket = vllm.plain(tokens), vllm.store(tokens), vllm.ticket(others)
    (adapted,) = vllm.ask((others, ticket, vllm.fresh("tenant")), lora_request=[lora])
    assert adapted.tokens != vllm.plain(others).tokens  # or the adapter would change nothing
    report = vllm.finished(ticket)
    assert (report.reason, report.stored) == ("lora", ())
    vllm.ask((others, None, vllm.fresh()), lora_request=[lora])
    shared, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert shared.distance(plain) <= LIMIT
    assert event.num_computed == 61


def test_a_pass_beside_a_running_adapter_is_the_base_models(
    vllm: Vllm, text: Texts, copies: Copies, adapter: Path
) -> None:
    """The step's batch has rows of an adapter only; our pass, which has more rows, has none of it."""
    from vllm.lora.request import LoRARequest

    tokens, others, engine = text(600, 2), text(40, 3), vllm.llm.llm_engine
    plain, donor = vllm.plain(tokens), vllm.store(tokens)
    lora = LoRARequest("other", 1, str(adapter))
    beside = vllm.begin(others, vllm.ticket(others), salt=vllm.fresh(), max_tokens=200, lora_request=lora)
    for _ in range(4):
        engine.step()
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    mine = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=4)
    while state_of(vllm, ticket) is not State.RUNNING:  # until its load is reported
        engine.step()
    engine.abort_request([beside])
    done = {output.request_id: output for _ in range(20) for output in engine.step()}
    (choice,) = done[mine].outputs
    found, expected = choice.logprobs[0], plain.logprobs[0]
    assert max(abs(found[token].logprob - expected[token]) for token in found) <= LIMIT
    vllm.settle()


def test_our_pass_leaves_a_running_adapter_its_rows(
    vllm: Vllm, text: Texts, copies: Copies, adapter: Path
) -> None:
    """A request of an adapter is generating while planned requests come: every token is what it is alone."""
    from vllm.lora.request import LoRARequest

    lora, prompt = LoRARequest("other", 1, str(adapter)), text(200, 3)
    (alone,) = vllm.ask((prompt, None, vllm.fresh()), lora_request=[lora], max_tokens=12)
    plans = []
    for tokens in (text(300, seed) for seed in (4, 5, 6)):
        ticket = vllm.ticket(tokens, copies(vllm.store(tokens), (0, 100), (130, 200), (210, 280)))
        plans.append((tokens, ticket, private_salt(ticket.ticket_id)))
    beside, *_ = vllm.ask(
        (prompt, None, vllm.fresh()), *plans, lora_request=[lora, *[None] * len(plans)], max_tokens=12
    )
    assert beside.distance(alone) <= LIMIT
    assert [vllm.finished(ticket).decision for _, ticket, _ in plans] == ["approx"] * 3


def state_of(vllm: Vllm, ticket: Ticket) -> State | None:
    """Of the request with this ticket; None before vLLM has it."""
    requests = vllm.side.scheduler._requests.values()
    return next((each.state for each in requests if each.ticket.ticket_id == ticket.ticket_id), None)


def test_a_prompt_of_embeddings_is_neither_shared_nor_stored(vllm: Vllm, text: Texts) -> None:
    """Beside prompts of tokens, which are: nobody could compare it with another one."""
    import torch
    from vllm import SamplingParams

    ticket = vllm.ticket(text(50))
    extra = {"kv_transfer_params": {"kvshare": ticket.to_json()}}
    embeddings = torch.randn(50, 128, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0, max_tokens=2, extra_args=extra)
    vllm.llm.generate([{"prompt_embeds": embeddings}], [params], use_tqdm=False)
    vllm.settle()
    report = vllm.finished(ticket)
    assert (report.reason, report.stored) == ("not_tokens", ())
