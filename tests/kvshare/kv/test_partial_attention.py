"""The oracles of partial attention: it must equal a plain prefill wherever that is what was asked for."""

import numpy as np
import pytest
import torch

from delta_tree import Copy, NodeId, SegmentId, Span, gaps, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass, take_pass
from kvshare.kv.sequence import SequenceKV
from kvshare_lab.bench.random_models import ARCHITECTURES, VOCAB_SIZE, tiny_model

TOKENS = 120
RUNS = (Span(7, 19), Span(40, 41), Span(60, 83), Span(110, 120))
FLOAT32 = 2e-5
BFLOAT16 = 0.15  # eight bits of mantissa, logits of a few units

EXPERTS = {"deepseek-v2", "deepseek-v3", "glm4-moe", "gpt-oss", "llama4", "minimax-m2"}  # chosen by rounding

architectures = pytest.mark.parametrize("name", sorted(ARCHITECTURES))


def prompt(seed: int = 0, length: int = TOKENS) -> np.ndarray:
    return token_ids(np.random.default_rng(seed).integers(3, VOCAB_SIZE, length))


def reference(name: str, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits (T, V) of a plain forward pass of an untouched model, with transformers' own eager attention."""
    model = tiny_model(name, dtype=dtype)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.as_tensor(tokens.astype(np.int64))[None]).logits
        return logits[0].float()


def embedded(name: str, dtype: torch.dtype = torch.float32) -> EmbeddedModel:
    return EmbeddedModel(tiny_model(name, dtype=dtype), name=name)


def run_pass(
    model: EmbeddedModel, kv: SequenceKV, runs: tuple[Span, ...], tokens: np.ndarray
) -> torch.Tensor:
    """Logits after every computed position, (N, V)."""
    current = PartialPass(kv, runs)
    ids = np.concatenate([tokens[run.start : run.end] for run in runs])
    return model.logits(current, ids, keep=current.num_queries)


def prefilled(model: EmbeddedModel, tokens: np.ndarray) -> SequenceKV:
    kv = model.new_sequence(len(tokens))
    run_pass(model, kv, (Span(0, len(tokens)),), tokens)
    return kv


def poisoned_copy(kv: SequenceKV, runs: tuple[Span, ...]) -> SequenceKV:
    """The same KV with the runs' slots filled with huge numbers: a leak from an open slot cannot hide."""
    other = kv.fork(kv.capacity)
    for run in runs:
        other.k[:, run.start : run.end] = 1e4
        other.v[:, run.start : run.end] = 1e4
    return other


@architectures
def test_all_placeholders_equal_a_normal_prefill(name: str) -> None:
    """Computing every position is the model's own forward pass."""
    model, tokens = embedded(name), prompt()
    logits = run_pass(model, model.new_sequence(TOKENS), (Span(0, TOKENS),), tokens)
    torch.testing.assert_close(logits, reference(name, tokens), atol=FLOAT32, rtol=0)


@architectures
def test_scattered_runs_on_correct_kv_equal_a_normal_prefill(name: str) -> None:
    """Placeholders scattered over a prompt get the logits of the full pass."""
    model, tokens = embedded(name), prompt()
    kv = poisoned_copy(prefilled(model, tokens), RUNS)
    logits = run_pass(model, kv, RUNS, tokens)
    positions = torch.cat([torch.arange(run.start, run.end) for run in RUNS])
    torch.testing.assert_close(logits, reference(name, tokens)[positions], atol=FLOAT32, rtol=0)


@architectures
def test_many_short_runs_between_long_ones_equal_a_normal_prefill(name: str) -> None:
    """Short ones are computed in one call of the kernel: each row sees what it must and no more."""
    model, tokens = embedded(name), prompt(length=400)
    singles = tuple(Span(place, place + 1) for place in range(210, 300, 3))
    runs = (Span(5, 80), Span(90, 91), Span(100, 130), Span(135, 205), *singles, Span(310, 390))
    kv = poisoned_copy(prefilled(model, tokens), runs)
    logits = run_pass(model, kv, runs, tokens)
    positions = torch.cat([torch.arange(run.start, run.end) for run in runs])
    torch.testing.assert_close(logits, reference(name, tokens)[positions], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - EXPERTS))
def test_bfloat16_stays_within_its_precision(name: str) -> None:
    """In bfloat16 the same holds up to the type's own rounding."""
    model, tokens = embedded(name, torch.bfloat16), prompt()
    kv = poisoned_copy(prefilled(model, tokens), RUNS)
    logits = run_pass(model, kv, RUNS, tokens)
    positions = torch.cat([torch.arange(run.start, run.end) for run in RUNS])
    expected = reference(name, tokens, torch.bfloat16)[positions]
    torch.testing.assert_close(logits, expected, atol=BFLOAT16, rtol=0.05)


@architectures
def test_runs_in_one_pass_equal_runs_from_left_to_right(name: str) -> None:
    """The order of computation does not matter, also on KV that belongs to another prompt."""
    model, tokens = embedded(name), prompt()
    foreign = prefilled(model, prompt(seed=1))
    together, apart = poisoned_copy(foreign, RUNS), poisoned_copy(foreign, RUNS)
    joint = run_pass(model, together, RUNS, tokens)
    single = torch.cat([run_pass(model, apart, (run,), tokens) for run in RUNS])
    torch.testing.assert_close(joint, single, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(together.k, apart.k, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(together.v, apart.v, atol=FLOAT32, rtol=0)


def test_a_split_into_chunks_changes_nothing() -> None:
    """Passes of at most 5 queries give the KV of one pass."""
    model, tokens = embedded("llama"), prompt()
    foreign = prefilled(model, prompt(seed=1))
    whole, chunked = poisoned_copy(foreign, RUNS), poisoned_copy(foreign, RUNS)
    run_pass(model, whole, RUNS, tokens)
    rest: tuple[Span, ...] = RUNS
    while rest:
        current, rest = take_pass(chunked, rest, max_queries=5)
        assert current.num_queries <= 5
        model.compute(current, np.concatenate([tokens[run.start : run.end] for run in current.runs]))
    torch.testing.assert_close(chunked.k, whole.k, atol=FLOAT32, rtol=0)


def test_a_recomputed_token_sees_no_later_key() -> None:
    """
    Poison behind a run changes nothing.

    The published CacheBlend code aligns its causal mask to the end of the sequence, so recomputed tokens see
    later keys; this test fails on that shortcut.
    """
    model, tokens = embedded("llama"), prompt()
    run = (Span(30, 50),)
    clean = prefilled(model, tokens)
    poisoned = poisoned_copy(clean, (Span(50, TOKENS),))
    expected = reference("llama", tokens)[30:50]
    torch.testing.assert_close(run_pass(model, poisoned, run, tokens), expected, atol=FLOAT32, rtol=0)
    both = (Span(30, 50), Span(118, 120))  # a later run makes later keys visible to the pass, not to this run
    logits = run_pass(model, poisoned_copy(clean, (Span(50, 118),)), both, tokens)
    torch.testing.assert_close(logits[:20], expected, atol=FLOAT32, rtol=0)


@architectures
def test_a_shifted_copy_at_layer_0_equals_computing_it_there(name: str) -> None:
    """Layer 0's rows depend on token and position alone, so a moved row must be the computed one."""
    model, tokens = embedded(name), prompt(length=60)
    assert model.layout.can_move, model.unsupported_reason
    source = prefilled(model, tokens)
    for shift in (1, 17, 200):
        padded = np.concatenate([prompt(seed=2, length=shift), tokens])
        target = prefilled(model, token_ids(padded))
        for plane, near, far in zip(model.layout.planes, source.planes, target.planes, strict=True):
            further, back = plane.moved(near, shift)[0], plane.moved(far[:, shift:], -shift)[0]
            torch.testing.assert_close(further, far[0, shift:], atol=FLOAT32, rtol=0)
            torch.testing.assert_close(back, near[0], atol=FLOAT32, rtol=0)


def test_without_edits_the_layout_is_bit_exact() -> None:
    """Copying a prompt's own KV back gives the same bits, so decoding goes on the same."""
    model, tokens = embedded("llama"), prompt()
    source = prefilled(model, tokens)
    target = model.new_sequence(TOKENS)
    segment = SegmentId(1)
    copies = [Copy(NodeId(1), segment, 0, TOKENS, 0, 0, 0)]
    num_bytes = target.write_copies(copies, {segment: source.cut(Span(0, TOKENS))})
    assert torch.equal(target.k, source.k)
    assert torch.equal(target.v, source.v)
    assert num_bytes == TOKENS * model.layout.bytes_per_token


NEAR_SIGHTED = ["cohere2", "exaone4", "gemma2", "gemma3", "gpt-oss", "llama4", "mistral-window", "olmo3"]


@pytest.mark.parametrize("name", NEAR_SIGHTED)
def test_window_layers_get_what_somebody_sees_and_no_more(name: str) -> None:
    """All other slots hold poison, and neither the prompt's logits nor those of tokens behind it know."""
    model, tokens = embedded(name), prompt()
    runs = (Span(50, 53), Span(100, 104))
    source = prefilled(model, tokens)
    segment, target = SegmentId(1), model.new_sequence(TOKENS)
    for plane in target.planes:
        plane.fill_(1e4)
    copies = [
        Copy(NodeId(1), segment, span.start, len(span), span.start, span.start, span.start)
        for span in gaps(runs, 104)
    ]
    num_bytes = target.write_copies(copies, {segment: source.cut(Span(0, TOKENS))}, computed=runs)
    behind = (Span(104, 110),)
    found = torch.cat([run_pass(model, target, runs, tokens), run_pass(model, target, behind, tokens)])
    positions = torch.cat([torch.arange(run.start, run.end) for run in (*runs, *behind)])
    torch.testing.assert_close(found, reference(name, tokens)[positions], atol=FLOAT32, rtol=0)
    seen = 0  # by hand: copied slots that tokens of the runs see, layer by layer
    for reach in model.layout.reaches:
        see = {slot for run in runs for slot in range(reach.first(run.start), run.end)}
        seen += len(see - {slot for run in runs for slot in range(run.start, run.end)})
    assert num_bytes == seen * model.layout.bytes_per_token / model.layout.num_layers
    assert num_bytes < 0.9 * sum(copy.length for copy in copies) * model.layout.bytes_per_token
