"""The embedded engine: how answers are sampled and streamed, and what is refused before."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvshare.embedded.engine import EmbeddedEngine
from kvshare.engine import (
    Delta,
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
)
from kvshare.errors import (
    ContextLengthError,
    OverloadedError,
    RequestError,
)
from kvshare_lab.bench.random_models import tiny_model
from tests.kvshare.embedded.tiny_engine import (
    engine_at,
    events,
    prompt,
    report_of,
    request,
    stream,
    tokens_of,
)


async def test_sampling_is_reproducible_by_seed_and_choices_differ(engine: EmbeddedEngine) -> None:
    """The same seed gives the same n choices; the choices themselves are different draws."""
    wanted = await request(engine, prompt(60), temperature=1.5, seed=7, n=3)
    runs = [await events(engine, wanted) for _ in range(2)]
    texts = [
        ["".join(e.text for e in run if isinstance(e, Delta) and e.choice == k) for k in range(3)]
        for run in runs
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert isinstance(runs[0][-1], Finished)
    assert runs[0][-1].num_completion_tokens == sum(isinstance(e, Delta) for e in runs[0])


async def test_logit_bias_stop_and_length_end_a_choice(engine: EmbeddedEngine) -> None:
    """A forced token repeats until the limit; as a stop string it is not shown; as EOS it ends the answer."""
    letter = engine.server.encoder.backend.encode("a", add_special_tokens=False).ids[0]
    forced: dict[str, Any] = {"logit_bias": {letter: 100.0}}
    limited = await events(engine, await request(engine, prompt(50), **forced))
    assert "".join(tokens_of(limited)) == "a" * 8
    assert [e.finish_reason for e in limited if isinstance(e, Delta)][-1] is FinishReason.LENGTH
    stopped = await events(engine, await request(engine, prompt(50), stop=("aaa",), **forced))
    assert "".join(tokens_of(stopped)) == ""
    assert [e.finish_reason for e in stopped if isinstance(e, Delta)][-1] is FinishReason.STOP
    partial = await events(engine, await request(engine, prompt(50), stop=("aab",), max_tokens=4, **forced))
    assert "".join(tokens_of(partial)) == "aaaa"
    eos = min(engine.server.eos_token_ids)
    ended = await events(engine, await request(engine, prompt(50), logit_bias={eos: 100.0}))
    assert [e.num_tokens for e in ended if isinstance(e, Delta)] == [1]


async def test_logprobs_are_those_of_the_plain_model(engine: EmbeddedEngine) -> None:
    """The first token's log-probability is the untouched model's."""
    tokens = prompt(80)
    found = await events(engine, await request(engine, tokens, logprobs=3, max_tokens=1))
    entry = next(e for e in found if isinstance(e, Delta)).logprobs[0]
    model = tiny_model("llama")
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    expected, order = logits.log_softmax(-1).topk(3)
    assert entry.logprob == pytest.approx(float(expected[0]), abs=1e-4)
    assert [top.token_id for top in entry.top] == order.tolist()


async def test_streams_interleave(engine: EmbeddedEngine) -> None:
    """A second request gets tokens while the first still decodes."""
    order: list[str] = []

    async def follow(name: str, wanted: GenerationRequest) -> None:
        async for event in stream(engine, wanted):
            if isinstance(event, Delta):
                order.append(name)

    wanted = [await request(engine, prompt(60, seed=k), max_tokens=40) for k in range(2)]
    await asyncio.gather(follow("a", wanted[0]), follow("b", wanted[1]))
    switches = sum(left != right for left, right in pairwise(order))
    assert switches >= 20


async def test_a_closed_stream_frees_its_slot_at_once(tmp_path: Path) -> None:
    """With one slot, a waiting request starts when the running one is closed; its prefill is kept."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1})
    await engine.start()
    try:
        running = stream(engine, await request(engine, prompt(60), max_tokens=900))
        assert isinstance(await anext(running), Started)
        assert isinstance(await anext(running), Delta)
        waiting = asyncio.create_task(events(engine, await request(engine, prompt(60, seed=1))))
        await asyncio.sleep(0.05)
        assert engine.status().num_waiting == 1
        await running.aclose()
        assert isinstance((await asyncio.wait_for(waiting, 60))[-1], Finished)
        assert engine.status().num_running == 0
        again = await events(engine, await request(engine, prompt(60)))
        assert report_of(again[0]).num_exact == 59
    finally:
        await engine.stop()


async def test_a_full_queue_is_refused(tmp_path: Path) -> None:
    """One runs, none may wait: the second request is told so before it starts."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1, "engine.max_waiting": 0})
    await engine.start()
    try:
        running = stream(engine, await request(engine, prompt(60), max_tokens=900))
        await anext(running)
        with pytest.raises(OverloadedError):
            await anext(stream(engine, await request(engine, prompt(60, seed=1))))
        await running.aclose()
    finally:
        await engine.stop()


async def test_prompts_that_do_not_fit_are_refused_before_they_start(engine: EmbeddedEngine) -> None:
    """Prompt and completion must fit the context; an empty prompt is no prompt."""
    with pytest.raises(ContextLengthError) as caught:
        await events(engine, await request(engine, prompt(1020), max_tokens=100))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthError):
        await events(engine, await request(engine, prompt(1024), max_tokens=None))
    with pytest.raises(RequestError):
        await events(engine, await request(engine, prompt(0)))
    with pytest.raises(RequestError, match="vocabulary"):
        await engine.encode_tokens([10**6])
    assert engine.status().num_nodes == 0


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes take seconds to tokenize; that they are too long can be seen from their length."""
    monkeypatch.setattr(engine.server.encoder, "_tokenizer", None)  # whoever tokenizes, fails otherwise
    with pytest.raises(ContextLengthError):
        await engine.encode_text("word " * 1_000_000)
