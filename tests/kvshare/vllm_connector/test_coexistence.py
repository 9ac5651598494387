"""Sharing beside everything else vLLM does: its prefix cache, chunked prefill, preemption, choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.starts import ASYNC, IN_CHUNKS, IN_SMALL_STEPS, STEP_TOKENS, starts

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.vllm_connector.worker.placeholders import ArrivedLoad
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def local_hits(vllm: Vllm, tokens: list[int], salt: str) -> int:
    """How many tokens of a prompt vLLM's own prefix cache serves under a salt."""
    ticket = vllm.ticket(tokens, store=False)
    vllm.ask((tokens, ticket, salt))
    return int(vllm.finished(ticket).num_local)


def test_approximate_kv_never_enters_the_prefix_cache(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """KV of another text is written under a prompt; without a plan the same prompt is answered right."""
    donor = vllm.store(text(600, 1))
    tokens = text(600, 2)
    wrong, event = vllm.shared(tokens, copies(donor, (0, 580)))
    assert event.used == (0, 1)
    truth = vllm.plain(tokens)
    assert wrong.logprobs[0] != truth.logprobs[0]  # the written KV was really used: this test can fail
    for salt in (None, "tenant", "tenant"):
        (answer,) = vllm.ask((tokens, None, salt))
        assert answer.distance(truth) <= LIMIT


def test_the_prefix_cache_would_have_served_it(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """The control: where the private salt is known, vLLM finds the blocks of a request that runs."""
    from kvshare.vllm_protocol.salts import private_salt

    donor = vllm.store(text(600, 1))
    tokens = text(600, 3)
    ticket = vllm.ticket(tokens, copies(donor, (0, 580)))
    salt = private_salt(ticket.ticket_id)
    vllm.ask((tokens, ticket, salt))
    assert local_hits(vllm, tokens, salt) == 0
    ticket = vllm.ticket(tokens, copies(donor, (0, 580)))
    salt = private_salt(ticket.ticket_id)
    vllm.begin(tokens, ticket, salt=salt)
    while vllm.prefilled(ticket) is None:
        vllm.llm.llm_engine.step()
    unplanned = vllm.ticket(tokens, store=False)
    again, _ = vllm.ask((tokens, unplanned, salt))  # and the one that runs
    assert vllm.finished(unplanned).num_local >= 512
    assert again.logprobs[0] != vllm.plain(tokens).logprobs[0]


@pytest.mark.parametrize("salt", [None, "tenant", "kvshare-private-other"])
def test_an_approximate_ticket_without_its_salt_is_refused(
    vllm: Vllm, text: Texts, copies: Copies, salt: str | None
) -> None:
    """It is served in full, exactly, and kept as what it is."""
    donor, tokens = vllm.store(text(600, 1)), text(600, 4)
    ticket = vllm.ticket(tokens, copies(donor, (0, 580)))
    (answer,) = vllm.ask((tokens, ticket, salt))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.reason, event.used) == ("not_private", ())
    assert [(s.start, s.length) for s in event.stored] == [(0, 256), (256, 344), (600, 3)]


def test_exact_requests_keep_hitting_the_prefix_cache(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """The second of two equal prompts of a tenant is vLLM's own hit; nothing is loaded for it."""
    tokens = text(600, 5)
    first = vllm.ticket(tokens)
    (plain,) = vllm.ask((tokens, first, "tenant"))
    donor = vllm.finished(first)
    second = vllm.ticket(tokens, copies(donor, (0, 512)), exact_length=512)
    (answer,) = vllm.ask((tokens, second, "tenant"))
    event = vllm.finished(second)
    assert answer.distance(plain) <= LIMIT
    assert (event.num_local, event.used, event.decision) == (512, (0, 1), "exact")
    assert "write" not in event.stage_seconds


def test_kv_loaded_for_an_exact_plan_may_be_found_by_others(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Exact KV is what the prefix cache holds anyway: who asks next gets it from there, and it is right."""
    tokens = text(600, 6)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, (0, 599)), exact_length=599)
    vllm.ask((tokens, ticket, "late-tenant"))
    assert vllm.finished(ticket).num_local == 0
    (answer,) = vllm.ask((tokens, None, "late-tenant"))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert local_hits(vllm, tokens, "late-tenant") == 512


def test_blocks_that_another_request_is_about_to_fill(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """
    A local hit on blocks of the same step holds nothing yet when placeholders behind it are computed.

    What is computed from them would be found by the whole tenant.
    """
    tokens = text(600, 10)
    gone, donor = vllm.store(tokens[:300]), vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(gone, (0, 300)) + copies(donor, (300, 590)), exact_length=590)
    vllm.drop(gone)
    _, answer = vllm.ask((tokens[:200] + text(100, 11), None, "burst"), (tokens, ticket, "burst"))
    event = vllm.finished(ticket)
    assert (event.num_local, event.used) == (128, (1,))
    truth = vllm.plain(tokens)
    assert answer.distance(truth) <= LIMIT
    (again,) = vllm.ask((tokens, None, "burst"))
    assert again.distance(truth) <= LIMIT


def test_choices_share_one_ticket(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """n = 3 sends a ticket three times: all are right, one is kept and told of."""
    from kvshare.vllm_protocol.salts import private_salt

    tokens = text(600, 7)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    answers = vllm.ask((tokens, ticket, private_salt(ticket.ticket_id)), n=3, temperature=0.01)
    truth = vllm.plain(tokens)
    assert len(answers) == 3
    assert all(answer.distance(truth) <= LIMIT for answer in answers)
    assert vllm.finished(ticket).used == (0, 1, 2, 3, 4)


def test_generated_tokens_are_kept(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """In a segment of their own, all but the last token; a follow-up reuses them exactly."""
    tokens = text(300, 8)
    ticket = vllm.ticket(tokens)
    (answer,) = vllm.ask((tokens, ticket, "tenant"), max_tokens=40)
    donor = vllm.finished(ticket)
    assert donor.output_ids == tuple(answer.tokens[:-1])
    assert [(segment.start, segment.length) for segment in donor.stored] == [(0, 300), (300, 39)]
    follow_up = tokens + answer.tokens[:-1] + text(30, 9)
    shared, event = vllm.shared(follow_up, copies(donor, (0, 339)))
    assert event.num_computed == 30
    assert shared.distance(vllm.plain(follow_up)) <= LIMIT


@pytest.mark.parametrize(
    ("step_tokens", "is_async"),
    [
        pytest.param(128, False, marks=IN_CHUNKS, id="chunked"),
        pytest.param(
            1024,
            False,
            marks=starts(max_num_batched_tokens=1024, enable_chunked_prefill=False),
            id="unchunked",
        ),
        pytest.param(2048, True, marks=ASYNC, id="async"),
        pytest.param(
            128, True, marks=starts(max_num_batched_tokens=128, async_scheduling=True), id="chunked-async"
        ),
    ],
)
def test_scheduling_modes(vllm: Vllm, text: Texts, copies: Copies, step_tokens: int, is_async: bool) -> None:
    """Placeholders beyond the step's token limit, long tails, chunked prefill on and off, steps in flight."""
    from kvshare.vllm_protocol.salts import private_salt

    assert vllm.side.info().settings["async_scheduling"] == is_async
    scheduled = vllm.core.vllm_config.scheduler_config
    assert scheduled.max_num_batched_tokens == step_tokens
    assert scheduled.enable_chunked_prefill == (step_tokens != 1024)
    texts = [text(700, 30 + seed) for seed in range(3)]
    donors = [vllm.store(tokens) for tokens in texts]
    spans = [((0, 10), (400, 690)), ((0, 300),), ((650, 690),)]  # a long run, a long tail, nearly everything
    requests = []
    for tokens, donor, wanted in zip(texts, donors, spans, strict=True):
        ticket = vllm.ticket(tokens, copies(donor, *wanted))
        requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
    answers = vllm.ask(*requests, max_tokens=10)
    for (tokens, ticket, _), answer in zip(requests, answers, strict=True):
        assert vllm.finished(ticket).decision == "approx"
        assert answer.distance(vllm.plain(tokens, max_tokens=10)) <= LIMIT


FEW_BLOCKS = {"max_model_len": 256, "num_gpu_blocks_override": 14, "block_size": 32}


@pytest.mark.parametrize(
    "is_async",
    [
        pytest.param(False, marks=starts(**FEW_BLOCKS)),
        pytest.param(True, marks=starts(**FEW_BLOCKS, async_scheduling=True)),
    ],
)
def test_preemption(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """A KV cache too small for all: preempted requests find their plan again and end as they should."""
    from kvshare.vllm_protocol.salts import private_salt

    assert vllm.side.info().settings["async_scheduling"] == is_async
    texts = [text(60, 50 + seed) for seed in range(6)]
    donors = [vllm.store(tokens) for tokens in texts]
    truths = [vllm.plain(tokens, max_tokens=30) for tokens in texts]
    before = vllm.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    assert before == 14
    preempted: list[str] = []
    preempt = vllm.scheduler._preempt_request

    def noted_preempt(request: Request, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *rest, **options)

    monkeypatch.setattr(vllm.scheduler, "_preempt_request", noted_preempt)
    requests = []
    for tokens, donor in zip(texts, donors, strict=True):
        ticket = vllm.ticket(tokens, copies(donor, (0, 20), (26, 50)))
        requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
    answers = vllm.ask(*requests, max_tokens=30)
    assert preempted
    for answer, truth in zip(answers, truths, strict=True):
        assert answer.distance(truth) <= LIMIT


@IN_SMALL_STEPS
def test_planned_requests_wait_their_turn(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six arrive together, each larger than a step: computed one after the other in parts, and right."""
    from kvshare.vllm_protocol.salts import private_salt

    texts = [text(270, 80 + seed) for seed in range(6)]
    donors = [vllm.store(tokens) for tokens in texts]
    truths = [vllm.plain(tokens) for tokens in texts]
    computed: list[list[str]] = []
    placeholders = vllm.worker.parts.placeholders
    compute = placeholders._compute

    def noted_compute(loads: Sequence[ArrivedLoad], joining: Sequence[ArrivedLoad]) -> Counter[str]:
        computed.append([load.request_id for load in loads])
        num_run = compute(loads, joining)
        assert num_run.total() <= STEP_TOKENS
        return num_run

    monkeypatch.setattr(placeholders, "_compute", noted_compute)
    requests = []
    for tokens, donor in zip(texts, donors, strict=True):
        ticket = vllm.ticket(tokens, copies(donor, (0, 90), (170, 250)))
        requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
    answers = vllm.ask(*requests)
    numbers = [int(name.split("-")[0]) for (name,) in computed]
    assert numbers == sorted(numbers)
    assert list(Counter(numbers).values()) == [3] * 6  # of eighty tokens
    for answer, truth, (_, ticket, _) in zip(answers, truths, requests, strict=True):
        assert answer.distance(truth) <= LIMIT
        assert vllm.finished(ticket).decision == "approx"
