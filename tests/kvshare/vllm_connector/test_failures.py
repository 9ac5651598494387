"""Whatever goes wrong with sharing, the answer is the plain one, and what is kept is right."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from delta_tree import segment_tokens
from kvshare.vllm_protocol.messages import PROTOCOL, Ticket, budget_of

if TYPE_CHECKING:
    from delta_tree import SegmentId
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_connector.worker.segment_store import Stored
    from kvshare.vllm_connector.worker.transfers import PendingLoad
    from tests.kvshare.vllm_connector.conftest import Copies, Start, Texts, Vllm

LIMIT = 1e-4
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def dropped(vllm: Vllm) -> set[int]:
    return {i for event in vllm.events() if event.kind == "dropped" for i in event.segment_ids}


def corrupt(vllm: Vllm, segment_id: SegmentId) -> None:
    """One row of the stored keys is no longer what was put there."""
    import torch

    stored = vllm.worker.attached.store.find([segment_id])[segment_id]
    with torch.inference_mode():
        stored.rows[:, 1, 0, 250] += 1.0


def test_a_segment_that_vanished_is_computed(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """All copies of a dropped segment become placeholders; the prompt is exact again and kept whole."""
    tokens = text(600, 1)
    donor = vllm.store(tokens)
    assert vllm.drop(donor) == 3
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "segments_gone", ())
    assert [(s.start, s.length) for s in event.stored] == [(0, 256), (256, 344), (600, 3)]


def test_one_of_two_donors_vanished(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """What is left of the plan is carried out."""
    tokens = text(600, 2)
    first, second = vllm.store(tokens), vllm.store(tokens)
    plan = copies(first, (0, 200)) + copies(second, (220, 400)) + copies(first, (430, 580))
    vllm.drop(second)
    answer, event = vllm.shared(tokens, plan)
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("approx", "segments_gone", (0, 3))
    assert event.num_computed == 600 - 200 - 150


def test_corrupt_bytes_are_a_miss(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """A segment whose checksum no longer fits is computed instead, dropped, and told of as gone."""
    tokens = text(600, 3)
    good, bad = vllm.store(tokens), vllm.store(tokens)
    bad_id = bad.stored[0].segment_id
    corrupt(vllm, bad_id)
    answer, event = vllm.shared(tokens, copies(good, (0, 200)) + copies(bad, (220, 590)), max_tokens=8)
    assert answer.distance(vllm.plain(tokens, max_tokens=8)) <= LIMIT
    assert event.used == (0, 2)  # its second segment is whole
    assert bad_id in dropped(vllm)
    assert bad_id not in vllm.side.segments


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_corrupt_bytes_found_in_a_requests_last_step(
    vllm: Vllm, text: Texts, copies: Copies, max_tokens: int
) -> None:
    """What the slots hold is known before the first token, however soon the request ends."""
    tokens = text(600, 4)
    good, bad = vllm.store(tokens), vllm.store(tokens)
    corrupt(vllm, bad.stored[0].segment_id)
    plan = copies(good, (0, 200)) + copies(bad, (220, 590))
    answer, event = vllm.shared(tokens, plan, max_tokens=max_tokens)
    assert answer.distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT
    assert event.stored
    assert bad.stored[0].segment_id not in {tuple(plan)[i].segment_id for i in event.used}


def part_of(vllm: Vllm, stage: str) -> tuple[object, str]:
    """The part of the worker that has a method, and its name."""
    part, name = stage.split(".")
    return getattr(vllm.worker.parts, part), name


def fail(*_: object) -> None:
    raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("stage", ["transfers._write_copies", "placeholders._compute"])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_load_that_breaks_off(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, stage: str, max_tokens: int
) -> None:
    """
    vLLM computes it in full, and it is kept; a request in the same step that shares nothing is not touched.
    """
    from kvshare.vllm_protocol.salts import private_salt

    tokens, other = text(600, 5), text(500, 6)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    with monkeypatch.context() as patch:
        patch.setattr(*part_of(vllm, stage), fail)
        answers = vllm.ask(
            (tokens, ticket, private_salt(ticket.ticket_id)),
            (other, None, vllm.fresh()),
            max_tokens=max_tokens,
        )
    event = vllm.finished(ticket)
    assert answers[0].distance(vllm.plain(tokens, max_tokens=max_tokens)) <= LIMIT
    assert answers[1].distance(vllm.plain(other, max_tokens=max_tokens)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "load_failed", ())
    assert sum(segment.length for segment in event.stored) == 600 + max_tokens - 1
    again, event = vllm.shared(tokens, copies(event, *SCATTERED))
    assert again.distance(vllm.plain(tokens)) <= LIMIT
    assert event.decision == "approx"


@pytest.mark.parametrize("stage", ["transfers._write_copies", "placeholders._compute"])
def test_a_load_that_breaks_off_with_a_step_in_flight(
    start: Start, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The next step is scheduled before vLLM hears of it, and without this request: nothing is lost."""
    vllm = start("llama", async_scheduling=True)
    tokens = text(600, 5)
    donor = vllm.store(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(*part_of(vllm, stage), fail)
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED), max_tokens=8)
    assert answer.distance(vllm.plain(tokens, max_tokens=8)) <= LIMIT
    assert (event.decision, event.reason, event.used) == ("full", "load_failed", ())
    vllm.check_idle()


def load(tokens: list[int]) -> LoadRequest:
    """A request without copies."""
    from kvshare.vllm_connector.metadata import LoadRequest

    return LoadRequest("r", (1, 2, 3, 4, 5), 0, 590, tuple(tokens[:590]), ())


def test_step_metadata_does_not_show_the_prompt(text: Texts) -> None:
    """vLLM writes a step's metadata into its log when the step fails."""
    from kvshare.vllm_connector.metadata import StepMetadata

    tokens = text(600, 5)
    assert f"{tokens[0]}, {tokens[1]}" not in repr(StepMetadata(loads=(load(tokens),)))


@pytest.mark.parametrize("fails", [True, False])
def test_one_that_is_aborted_while_it_is_loaded(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its blocks are free once the load is over, whatever that came to; nobody takes them for filled."""
    from vllm.v1.request import RequestStatus

    tokens = text(600, 13)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, (0, 590)), exact_length=590)
    may_copy, write_copies = threading.Event(), vllm.worker.parts.transfers._write_copies

    def write_late(load: PendingLoad, found: Mapping[SegmentId, Stored], mark: object) -> Mapping[str, float]:
        may_copy.wait()
        if fails:
            fail()
        return write_copies(load, found, mark)

    with monkeypatch.context() as patch:
        patch.setattr(vllm.worker.parts.transfers, "_write_copies", write_late)
        request_id = vllm.fresh()
        add(vllm, request_id, tokens, ticket, salt="tenant")
        for _ in range(3):
            vllm.core.step_fn()
        (request,) = vllm.scheduler.requests.values()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        vllm.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        vllm.core.step_fn()
        assert vllm.scheduler.requests
        may_copy.set()
        vllm.settle()
        vllm.llm.llm_engine.abort_request([request_id])
    vllm.check_idle()
    (answer,) = vllm.ask((tokens, None, "tenant"))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


def add(
    vllm: Vllm, request_id: str, tokens: list[int], ticket: Ticket, *, salt: str, max_tokens: int = 50
) -> None:
    from vllm import SamplingParams

    vllm.llm.llm_engine.add_request(
        request_id,
        {"prompt_token_ids": tokens, "cache_salt": salt},
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvshare": ticket.to_json()}},
        ),
    )


def test_a_segment_that_leaves_while_its_copy_is_in_use(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Copied KV is not kept as if it had been computed."""
    from kvshare.vllm_protocol.salts import private_salt

    tokens = text(600, 14)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    add(vllm, vllm.fresh(), tokens, ticket, salt=private_salt(ticket.ticket_id), max_tokens=6)
    for _ in range(2):
        vllm.llm.llm_engine.step()
    vllm.drop(donor)
    while vllm.llm.llm_engine.has_unfinished_requests():
        vllm.llm.llm_engine.step()
    vllm.settle()
    event = vllm.finished(ticket)
    assert (event.reason, event.used, event.stored) == ("segments_gone", (), ())


def test_a_segment_that_leaves_before_it_is_saved(start: Start, text: Texts) -> None:
    """Two prompts end in one step, the second needs the room of the first: one is told of and held."""
    vllm = start("llama", max_bytes=1536 * 800)
    prompts = [text(500, 60 + number) for number in range(2)]
    tickets = [vllm.ticket(tokens) for tokens in prompts]
    vllm.ask(*((tokens, ticket, "tenant") for tokens, ticket in zip(prompts, tickets, strict=True)))
    events = [vllm.finished(ticket) for ticket in tickets]
    assert sorted(bool(event.stored) for event in events) == [False, True]
    vllm.check_idle()


@pytest.mark.parametrize(
    "method",
    ["on_new_request", "get_num_new_matched_tokens", "saving.save_ended", "saving.note_prompt_saved"],
)
def test_an_error_of_ours_is_not_in_the_way(
    vllm: Vllm, text: Texts, copies: Copies, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The scheduler side breaks in one of its doors: the answer is the plain one."""
    from kvshare.vllm_protocol.salts import private_salt

    tokens = text(600, 15)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    with monkeypatch.context() as patch:
        *owners, name = method.split(".")
        patch.setattr(functools.reduce(getattr, owners, vllm.side.scheduler), name, fail)
        (answer,) = vllm.ask((tokens, ticket, private_salt(ticket.ticket_id)))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT


def test_a_save_that_breaks_off(vllm: Vllm, text: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is out already; nothing is kept, nothing is left over."""
    tokens, held = text(600, 7), len(vllm.side.segments)
    with monkeypatch.context() as patch:
        patch.setattr(vllm.worker.parts.transfers, "_copy_out", fail)
        event = vllm.store(tokens)
    assert (event.reason, event.stored, event.used) == ("save_failed", (), ())
    vllm.ask((text(50), None, None))  # the next step carries the drops
    assert len(vllm.side.segments) == held


def test_a_plan_for_another_prompt(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Digest and length tie a plan to its prompt; any other is served without it and not kept."""
    from kvshare.vllm_protocol.salts import private_salt

    tokens, other = text(600, 8), text(600, 9)
    donor = vllm.store(tokens)
    ticket = vllm.ticket(tokens, copies(donor, *SCATTERED))
    (answer,) = vllm.ask((other, ticket, private_salt(ticket.ticket_id)))
    event = vllm.finished(ticket)
    assert answer.distance(vllm.plain(other)) <= LIMIT
    assert (event.reason, event.stored) == ("prompt_mismatch", ())


def test_segments_of_another_namespace_are_not_laid(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """A ticket that names somebody else's segment gets nothing of it."""
    tokens = text(600, 10)
    donor = vllm.store(tokens, namespace="tenant-b")
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert (event.decision, event.used, event.num_computed) == ("full", (), 600)


def test_a_copy_beyond_its_segment_is_not_laid(vllm: Vllm, text: Texts) -> None:
    """More tokens than the segment has: a plan from another time. It is computed."""
    from kvshare.vllm_protocol.messages import WireCopy

    tokens = text(600, 11)
    donor = vllm.store(tokens[:300])
    copy = WireCopy(donor.stored[0].segment_id, 100, 250, 100, 100)
    answer, event = vllm.shared(tokens, [copy])
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    assert event.used == ()


@pytest.mark.parametrize(
    "document",
    [
        None,
        7,
        {},
        {"protocol": 99},
        {"protocol": PROTOCOL, "request_id": "x"},
        {"copies": [[1, 2]]},
        {"copies": [[1, 0, 50, 0, 0], [1, 0, 50, 20, 20]]},
        {"copies": [[1, 0, 600, 0, 0]]},
        {"copies": "none"},
    ],
)
def test_a_ticket_that_cannot_be_read(vllm: Vllm, text: Texts, document: object) -> None:
    """Rubbish in kv_transfer_params is logged and ignored."""
    from vllm import SamplingParams

    tokens = text(600, 12)
    if isinstance(document, dict) and "copies" in document:
        document = vllm.ticket(tokens).to_json() | document
    params = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": {"kvshare": document}}
    )
    (output,) = vllm.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    vllm.settle()
    assert list(output.outputs[0].token_ids) == vllm.plain(tokens, max_tokens=2).tokens


class TestAborts:
    """A client may go away at any time; nothing leaks and the next request is right."""

    def add(self, vllm: Vllm, tokens: list[int], ticket: Ticket) -> str:
        from kvshare.vllm_protocol.salts import private_salt

        request_id = vllm.fresh("abort")
        add(vllm, request_id, tokens, ticket, salt=private_salt(ticket.ticket_id))
        return str(request_id)

    @pytest.mark.parametrize("steps", [0, 1, 2, 5], ids=["waiting", "loaded", "decoding", "later"])
    @pytest.mark.parametrize("planned", [True, False])
    def test_at_any_step(self, vllm: Vllm, text: Texts, copies: Copies, steps: int, planned: bool) -> None:
        tokens = text(600, 20)
        donor = vllm.store(tokens)
        ticket = vllm.ticket(tokens, copies(donor, *SCATTERED) if planned else ())
        request_id = self.add(vllm, tokens, ticket)
        for _ in range(steps):
            vllm.llm.llm_engine.step()
        vllm.llm.llm_engine.abort_request([request_id])
        vllm.settle()
        event = vllm.finished(ticket)
        # With its first token the prompt is complete; a planned one is loaded in the step before.
        assert bool(event.stored) == (steps > planned)
        answer, _ = vllm.shared(tokens, copies(donor, *SCATTERED))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT

    def test_in_the_middle_of_a_long_prefill(self, start: Start, text: Texts, copies: Copies) -> None:
        """An unfinished prefill is not kept."""
        vllm = start("llama", max_num_batched_tokens=128)
        tokens = text(900, 21)
        donor = vllm.store(tokens)
        ticket = vllm.ticket(tokens, copies(donor, (0, 100), (130, 300)))
        request_id = self.add(vllm, tokens, ticket)
        for _ in range(2):
            vllm.llm.llm_engine.step()
        vllm.llm.llm_engine.abort_request([request_id])
        vllm.settle()
        assert vllm.finished(ticket).stored == ()
        vllm.check_idle()


def test_the_store_is_bounded(start: Start, text: Texts, copies: Copies) -> None:
    """Least recently used segments leave; a donor in use stays; the cap holds all along."""
    vllm = start("llama", max_bytes=1536 * 2000)
    first = vllm.store(text(500, 30))
    wanted = copies(first, (0, 480))
    for seed in range(6):
        vllm.store(text(500, 31 + seed))
        _, event = vllm.shared(text(500, 30), wanted)
        assert event.used == tuple(range(len(wanted)))
        vllm.check_idle()
    assert len(dropped(vllm)) >= 3
    assert first.stored[0].segment_id in vllm.side.segments


def test_segments_are_cut_by_what_the_proxy_lets_it_hold(start: Start, text: Texts) -> None:
    """As the embedded engine cuts them where the store has as many bytes; the last has what is left over."""
    vllm = start("llama", max_bytes=1536 * 24_000)
    stored = vllm.store(text(500, 77)).stored
    lengths = [segment.length for segment in stored if segment.start < 500]
    expected = segment_tokens(budget_of(1536 * 24_000) // 1536)
    assert expected == 41
    assert set(lengths[:-1]) == {expected}
    assert sum(lengths) == 500  # the answer is kept apart
    assert [segment.start for segment in stored if segment.start >= 500] == [500]
    vllm.check_idle()


def test_a_prompt_larger_than_the_store(start: Start, text: Texts) -> None:
    """It is served and not kept, and nobody is evicted for it."""
    vllm = start("llama", max_bytes=1536 * 400)
    kept = vllm.store(text(300, 40))
    event = vllm.store(text(500, 41))
    assert (event.reason, event.stored) == ("no_room", ())
    assert kept.stored[0].segment_id in vllm.side.segments
    vllm.check_idle()


def test_an_answer_that_finds_no_room_leaves_its_prompt(start: Start, text: Texts) -> None:
    vllm = start("llama", max_bytes=1536 * 320)
    tokens = text(300, 42)
    ticket = vllm.ticket(tokens)
    vllm.ask((tokens, ticket, vllm.fresh("tenant")), max_tokens=40)
    event = vllm.finished(ticket)
    assert event.reason == "no_room"
    assert sum(segment.length for segment in event.stored) == 300
    assert all(segment.segment_id in vllm.side.segments for segment in event.stored)
    vllm.check_idle()


def test_new_weights_drop_everything(start: Start, text: Texts, copies: Copies) -> None:
    """`reset_prefix_cache(reset_connector=True)`, as after a weight update."""
    vllm = start("llama")
    tokens = text(600, 50)
    donor = vllm.store(tokens)
    assert vllm.llm.reset_prefix_cache(reset_connector=True)
    assert len(vllm.side.segments) == 0
    _, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()
    vllm.check_idle()


@pytest.mark.parametrize("level", [1, 2])
def test_a_vllm_that_has_slept_shares_again(vllm: Vllm, text: Texts, copies: Copies, level: int) -> None:
    """
    vLLM has the connector drop what is stored. CPUs sleep in name only, so the test overwrites the blocks.

    vLLM 0.33 sends the workers' reports of the start again, which change nothing.
    """
    before, tokens = vllm.side.info(), text(600, 53)
    donor = vllm.store(tokens)
    vllm.core.sleep(level)
    for layer in vllm.worker.attached.cache.layers.values():
        layer.kv_cache.fill_(1e4)
    vllm.core.wake_up()
    vllm.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): vllm.worker.handshake})
    _, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()
    answer, event = vllm.shared(tokens, copies(vllm.store(tokens), *SCATTERED))
    assert event.decision == "approx"
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
    after = vllm.side.info()
    assert (after.refusals, after.warnings) == (before.refusals, before.warnings)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("reload_weights", ()), ("reset_weights", ()), ("sleep", (2,)), ("finish_weight_update", ())],
)
def test_whatever_changes_weights_drops_what_is_stored(
    vllm: Vllm, text: Texts, monkeypatch: pytest.MonkeyPatch, method: str, arguments: tuple[int, ...]
) -> None:
    """vLLM's own part is left out: it would zero the model, or asks for an engine that sends weights."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    donor = vllm.store(text(300, 54))
    with monkeypatch.context() as patch:
        patch.setattr(CPUWorker, method, lambda *_: None)
        vllm.llm.collective_rpc(method, args=arguments)
    vllm.llm.collective_rpc("wake_up")
    vllm.plain(text(40, 55))  # reports come with a step
    assert dropped(vllm) >= {segment.segment_id for segment in donor.stored}


def test_reloaded_weights_take_their_segments_with_them(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Also where nobody resets the connector; the journal tells of them with the next step."""
    tokens = text(600, 51)
    donor, other = vllm.store(tokens), vllm.store(text(300, 52))
    vllm.llm.collective_rpc("reload_weights")
    answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    assert event.used == ()
    gone = {segment.segment_id for event in (donor, other) for segment in event.stored}
    assert gone <= set(dropped(vllm))
    assert answer.distance(vllm.plain(tokens)) <= LIMIT
