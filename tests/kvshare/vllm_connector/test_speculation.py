"""
Speculative decoding in real vLLM: requests that share are as right as without it, and their drafts are
accepted as often as those of a full prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.fleet.watcher import _missing_fields
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from kvshare.vllm_protocol.messages import FinishedReport
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Copies, Start, Texts, Vllm

LIMIT = 1e-4  # log-probability, float32
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
NUM_DRAFTS = 3
ENOUGH = 1.8  # tokens a step, of a full prefill
LEAST = 0.97  # of them, of a shared one
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
REPEATS = {"allowed_token_ids": [5, 9]}  # an answer of two tokens repeats itself


def tokens_a_step(event: FinishedReport) -> float:
    return event.num_answer_tokens / event.num_answer_steps


def full(vllm: Vllm, tokens: list[int], **sampling: Any) -> FinishedReport:
    """A full prefill's report; its prompt is found nowhere, and not stored."""
    ticket = vllm.ticket(tokens, store=False)
    vllm.ask((tokens, ticket, vllm.fresh("full")), **sampling)
    return vllm.finished(ticket)


class TestNgram:
    """Drafts from the text. So few blocks that answers which grow preempt others."""

    @pytest.fixture
    def vllm(self, start: Start) -> Iterator[Vllm]:
        machine = start("llama", speculative_config=NGRAM, num_gpu_blocks_override=26)
        assert machine.side.info().speculation == "ngram"
        yield machine
        machine.check_idle()

    @pytest.mark.parametrize(("repeats", "at_least"), [({"allowed_token_ids": [5]}, ENOUGH), (REPEATS, 1.0)])
    def test_shared_answers_and_their_steps_equal_full_ones(
        self, vllm: Vllm, text: Texts, copies: Copies, repeats: dict[str, Any], at_least: float
    ) -> None:
        """Of an answer that only repeats itself, and of one whose drafts are rejected as often as not."""
        tokens = text(600, len(repeats["allowed_token_ids"]))
        donor = vllm.store(tokens, max_tokens=50)
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=60, **repeats)
        assert (event.decision, event.num_computed) == ("approx", 61)
        assert answer.distance(vllm.plain(tokens, max_tokens=60, **repeats)) <= LIMIT
        expected = tokens_a_step(full(vllm, tokens, max_tokens=60, **repeats))
        assert expected >= at_least
        assert tokens_a_step(event) >= LEAST * expected
        assert event.num_answer_tokens == 59

    def test_only_accepted_tokens_of_an_answer_are_stored(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        """What is stored of an answer is what a full prefill of the same tokens computes."""
        tokens = text(300, 1)
        ticket = vllm.ticket(tokens)
        (answer,) = vllm.ask((tokens, ticket, vllm.fresh("tenant")), max_tokens=60, **REPEATS)
        donor = vllm.finished(ticket)
        assert tokens_a_step(donor) > 1
        assert list(donor.output_ids) == answer.tokens[:-1]
        longer = tokens + answer.tokens + text(40, 2)
        end = len(tokens) + len(donor.output_ids)
        shared, event = vllm.shared(longer, copies(donor, (0, end)), max_tokens=8)
        assert event.num_computed == len(longer) - end
        assert shared.distance(vllm.plain(longer, max_tokens=8)) <= LIMIT

    def test_preemption_while_drafts_are_rejected_and_saves_run(
        self, vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preempted: list[str] = []
        preempt = vllm.scheduler._preempt_request

        def noting(request: Any, *given: Any, **named: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *given, **named)

        monkeypatch.setattr(vllm.scheduler, "_preempt_request", noting)
        texts = [text(600 + 5 * seed, 20 + seed) for seed in range(5)]
        donors = [vllm.store(tokens) for tokens in texts]
        requests = []
        for tokens, donor in zip(texts, donors, strict=True):
            ticket = vllm.ticket(tokens, copies(donor, (0, 64), (90, 300), (310, 480)))
            requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
        answers = vllm.ask(*requests, max_tokens=60, **REPEATS)
        assert preempted
        for tokens, answer in zip(texts, answers, strict=True):
            assert answer.distance(vllm.plain(tokens, max_tokens=60, **REPEATS)) <= LIMIT


class TestDraftModel:
    """The draft is the target itself, so that a full prefill's drafts are all accepted."""

    @pytest.fixture
    def vllm(self, start: Start, checkpoint: Checkpoint) -> Iterator[Vllm]:
        machine = start("llama", speculative_config=by_model(checkpoint("llama")))
        yield machine
        machine.check_idle()

    def test_shared_answers_and_their_steps_equal_full_ones(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        tokens = text(600)
        donor = vllm.store(tokens)
        for copied in (copies(donor, *SCATTERED), copies(donor, (0, 599))):
            answer, event = vllm.shared(tokens, copied, max_tokens=40)
            assert event.decision == "approx"
            assert answer.distance(vllm.plain(tokens, max_tokens=40)) <= LIMIT
            expected = tokens_a_step(full(vllm, tokens, max_tokens=40))
            assert expected >= ENOUGH
            assert tokens_a_step(event) >= LEAST * expected

    def test_copies_from_host_memory_and_an_answer_as_donor(
        self, vllm: Vllm, text: Texts, copies: Copies
    ) -> None:
        tokens = text(500, 3)
        ticket = vllm.ticket(tokens)
        (answer,) = vllm.ask((tokens, ticket, vllm.fresh("tenant")), max_tokens=50)
        donor = vllm.finished(ticket)
        vllm.forget_blocks()
        longer = tokens + answer.tokens + text(30, 4)
        shared, event = vllm.shared(longer, copies(donor, (0, 260), (270, 549)), max_tokens=40)
        assert event.num_from_blocks == 0
        assert shared.distance(vllm.plain(longer, max_tokens=40)) <= LIMIT
        assert tokens_a_step(event) >= LEAST * tokens_a_step(full(vllm, longer, max_tokens=40))

    def test_text_moves_with_the_rows_of_its_draft(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """Both models' keys are rotated: its drafts are those of the target on the same copied rows."""
        tokens = text(500, 5)
        donor = vllm.store(tokens)
        moved = text(41, 6) + tokens
        _, event = vllm.shared(moved, copies(donor, (0, 240), (250, 490), shift=41), max_tokens=40)
        assert (event.decision, event.used) == ("approx", tuple(range(len(event.used))))
        assert tokens_a_step(event) >= LEAST * tokens_a_step(full(vllm, moved, max_tokens=40))

    def test_the_loss_of_the_rows_of_a_draft_is_seen(self, vllm: Vllm, text: Texts, copies: Copies) -> None:
        """A planted one: as if they had not been moved along. The answer is right all the same."""
        tokens = text(600, 7)
        donor = vllm.store(tokens)
        expected = tokens_a_step(full(vllm, tokens, max_tokens=40))
        ticket = vllm.ticket(tokens, copies(donor, (0, 599)))
        name = vllm.begin(tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=40)
        while not (request := running(vllm, name)).num_output_tokens:
            vllm.core.step_fn()
        (block_ids,) = vllm.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for layer_name, layer in vllm.worker.attached.cache.layers.items():
            if "draft_model" in layer_name:
                layer.kv_cache[list(block_ids)] = 0
        vllm.settle()
        assert tokens_a_step(vllm.finished(ticket)) < LEAST * expected


def test_a_draft_of_another_shape(start: Start, checkpoint: Checkpoint, text: Texts, copies: Copies) -> None:
    """One layer of fewer heads: rows of both shapes are saved and moved."""
    draft = checkpoint("llama", num_hidden_layers=1, num_key_value_heads=1)
    vllm, tokens = start("llama", speculative_config=by_model(draft)), text(600)
    assert vllm.side.info().refusals == ()
    assert vllm.side.info().can_move_keys
    donor = vllm.store(tokens)
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=20)
    assert event.decision == "approx"
    assert answer.distance(vllm.plain(tokens, max_tokens=20)) <= LIMIT
    assert tokens_a_step(event) == tokens_a_step(full(vllm, tokens, max_tokens=20))
    vllm.check_idle()


def test_a_draft_that_is_not_verified_leaves_requests_unshared(
    start: Start, checkpoint: Checkpoint, text: Texts
) -> None:
    """vLLM serves them, equal prefixes from its own cache; tickets are not taken."""
    vllm = start("llama", speculative_config=by_model(checkpoint("llama"), max_model_len=512))
    info = vllm.side.info()
    assert (info.shares, info.refusals, info.speculation) == (False, (), "draft_model")
    assert "512" in info.passing
    assert not _missing_fields(info)  # a proxy connects, and its requests say why they pass
    tokens = text(300)
    ticket = vllm.ticket(tokens)
    first, again = (vllm.ask((tokens, ticket, "tenant"), max_tokens=8)[0] for _ in range(2))
    assert first.distance(again) <= LIMIT
    assert vllm.events() == ()
    assert not vllm.scheduler.has_requests()


def by_model(path: object, **changes: Any) -> dict[str, Any]:
    own = {"model": str(path), "num_speculative_tokens": NUM_DRAFTS, "max_model_len": 1024}
    return {"method": "draft_model", **own, **changes}


def running(vllm: Vllm, name: str) -> Any:
    """vLLM's request of this name, to which it may have added something."""
    requests = vllm.scheduler.requests.items()
    (found,) = (request for each, request in requests if each == name or each.startswith(f"{name}-"))
    return found
