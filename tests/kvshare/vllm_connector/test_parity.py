"""Partial attention inside vLLM equals a full prefill, whatever is reused, if the reused KV is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kvshare.vllm_connector.starts import IN_BFLOAT16, starts

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kvshare.vllm_protocol.messages import FinishedReport, Ticket, WireCopy
    from tests.kvshare.vllm_connector.in_process_vllm import Copies, Texts, Vllm

# Half of a head in interleaved pairs (glm4); a layer without rotation, as transformers has it (smollm3);
# windows with two tables (gemma3), and with interleaved pairs and layers without rotation (cohere2).
IN_EVERY_RUN = ("llama", "llama3-rope", "qwen2", "qwen3", "glm4", "smollm3", "gemma3", "cohere2")
WITH_EXPERTS = ("glm4-moe", "gpt-oss")
OTHERS = ("exaone4", "gemma2", "olmo3", "phi", *WITH_EXPERTS)
LIMIT = 1e-4  # log-probability, float32
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))


def marks(name: str) -> list[pytest.MarkDecorator]:
    is_usual = name in ("llama", "qwen3")  # which other files start
    started = starts(name) if is_usual else starts(name, disable_hybrid_kv_cache_manager=True)
    return [started, *([pytest.mark.long] if name in OTHERS else [])]


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in (*IN_EVERY_RUN, *OTHERS)])
def architecture(request: pytest.FixtureRequest, vllm: Vllm) -> Vllm:
    assert vllm.model.name == request.param
    if request.param not in WITH_EXPERTS:
        return vllm
    # vLLM 0.32's CPU backend with experts: on several threads the same prompt has several answers.
    prompt = list(range(3, 203))
    first, *others = (vllm.plain(prompt) for _ in range(4))
    if any(other.tokens != first.tokens or other.distance(first) > LIMIT for other in others):
        pytest.skip(f"this vLLM does not repeat its own answers with {request.param}; OMP_NUM_THREADS=1 does")
    return vllm


class TestExactness:
    """float32: scattered runs, everything computed, everything reused, and a prefix."""

    def test_scattered_runs_on_correct_kv(self, architecture: Vllm, text: Texts, copies: Copies) -> None:
        vllm, tokens = architecture, text(600)
        donor = vllm.store(tokens)
        answer, event = vllm.shared(tokens, copies(donor, *SCATTERED))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
        assert (event.decision, event.used, event.num_computed) == ("approx", (0, 1, 2, 3, 4), 61)

    def test_all_placeholders(self, architecture: Vllm, text: Texts, copies: Copies) -> None:
        """One copied token near the end makes our pass compute everything before it."""
        vllm, tokens = architecture, text(600, 1)
        donor = vllm.store(tokens)
        answer, event = vllm.shared(tokens, copies(donor, (597, 598)))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
        assert event.num_computed == 599

    def test_identity(self, architecture: Vllm, text: Texts, copies: Copies) -> None:
        vllm, tokens = architecture, text(600, 2)
        donor = vllm.store(tokens)
        answer, event = vllm.shared(tokens, copies(donor, (0, 599)))
        assert answer.distance(vllm.plain(tokens)) <= LIMIT
        assert event.num_computed == 1

    def test_exact_prefix_from_segments(self, architecture: Vllm, text: Texts, copies: Copies) -> None:
        """An exact plan needs no private salt, and loads what vLLM's own prefix cache has not."""
        vllm, tokens = architecture, text(600, 3)
        donor = vllm.store(tokens)
        longer = tokens + text(90, 4)
        ticket = vllm.ticket(longer, copies(donor, (0, 600)), exact_length=600)
        (answer,) = vllm.ask((longer, ticket, vllm.fresh("tenant")))
        event = vllm.finished(ticket)
        assert answer.distance(vllm.plain(longer)) <= LIMIT
        assert (event.decision, event.num_computed, event.num_local) == ("exact", 90, 0)

    def test_a_batch_of_mixed_requests(self, architecture: Vllm, text: Texts, copies: Copies) -> None:
        """Planned, unplanned and exact requests of one step do not disturb one another."""
        from kvshare.vllm_protocol.salts import private_salt

        vllm = architecture
        texts = [text(500 + 30 * seed, 10 + seed) for seed in range(4)]
        donors = [vllm.store(tokens) for tokens in texts]
        requests: list[tuple[list[int], Ticket | None, str]] = []
        for tokens, donor in zip(texts, donors, strict=True):
            ticket = vllm.ticket(tokens, copies(donor, (0, 64), (90, 300), (310, 480)))
            requests.append((tokens, ticket, private_salt(ticket.ticket_id)))
        requests.insert(1, (text(700, 20), None, vllm.fresh()))
        requests.append((texts[0], vllm.ticket(texts[0]), vllm.fresh("tenant")))
        answers = vllm.ask(*requests)
        for (tokens, _, _), answer in zip(requests, answers, strict=True):
            assert answer.distance(vllm.plain(tokens)) <= LIMIT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=starts(dtype="bfloat16")),
        pytest.param("qwen3", marks=IN_BFLOAT16),
    ],
)
def test_bfloat16(vllm: Vllm, text: Texts, copies: Copies, name: str) -> None:
    """In bfloat16 the same plans give what rounding allows, and the layout is understood there, too."""
    tokens = text(600)
    assert vllm.model.name == name
    assert vllm.side.info().can_move_keys
    donor = vllm.store(tokens)
    shared, event = vllm.shared(tokens, copies(donor, *SCATTERED))
    plain = vllm.plain(tokens)
    assert event.used == (0, 1, 2, 3, 4)
    assert shared.tokens[0] == plain.tokens[0]
    first = plain.logprobs[0]
    assert all(abs(first[t] - shared.logprobs[0][t]) < 0.1 for t in first.keys() & shared.logprobs[0].keys())


def test_moved_copies_equal_the_embedded_engine(vllm: Vllm, text: Texts, copies: Copies) -> None:
    """Two engines that share no attention code give the same approximate answer for the same plan."""
    tokens = text(600)
    donor = vllm.store(tokens)
    recipient = text(41, 9) + tokens
    moved = copies(donor, (0, 100), (130, 300), (301, 560), shift=41)
    answer, event = vllm.shared(recipient, moved, max_tokens=1, logprobs=20)
    assert event.used == (0, 1, 2, 3)
    expected = embedded_logprobs(vllm.model, tokens, donor, recipient, moved)
    assert max(abs(expected[t].item() - value) for t, value in answer.logprobs[0].items()) <= LIMIT


def embedded_logprobs(
    path: Path, tokens: list[int], donor: FinishedReport, recipient: list[int], moved: list[WireCopy]
) -> torch.Tensor:
    """What the embedded engine gives for the next token of the recipient, with the donor's KV moved."""
    import torch

    from delta_tree import Copy, NodeId, Span, gaps
    from kvshare.embedded.decoder import load_network
    from kvshare.embedded.model import EmbeddedModel
    from kvshare.kv.attention import PartialPass

    model = EmbeddedModel(load_network(str(path), device="cpu"), name="tiny")
    source, target = model.new_sequence(len(tokens)), model.new_sequence(len(recipient))
    with torch.inference_mode():
        model.compute(PartialPass(source, (Span(0, len(tokens)),)), np.array(tokens, dtype=np.int32))
        segments = {
            part.segment_id: source.cut(Span(part.start, min(part.start + part.length, len(tokens))))
            for part in donor.stored
        }
        placed = [
            Copy(
                NodeId(1),
                copy.segment_id,
                copy.offset,
                copy.length,
                copy.target_start,
                copy.source_position,
                copy.source_position,
            )
            for copy in moved
        ]
        target.write_copies(placed, segments)
        runs = gaps([c.target for c in placed], len(recipient))
        ids = np.array([recipient[p] for run in runs for p in range(run.start, run.end)], dtype=np.int32)
        logits = model.compute(PartialPass(target, tuple(runs)), ids)
        return torch.log_softmax(logits.float().flatten()[-model.vocab_size :], -1)
