"""How the next token is drawn: as vLLM and Hugging Face define each parameter."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from delta_tree import token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.sampling import Draw, Sampler, probabilities, resolve
from kvshare.engine import SamplingParams
from kvshare_lab.bench.random_models import tiny_model

VOCAB = 50
NO_IDS = torch.zeros((1, 0), dtype=torch.int64)


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sampler(
    draw: Draw | None = None, *, prompt: tuple[int, ...] = (), ends: tuple[int, ...] = (), **params: Any
) -> Sampler:
    given = SamplingParams(**params)
    return Sampler(given, draw or resolve(given, {}), choice=0, prompt=token_ids(np.array(prompt)), ends=ends)


def one_hot(token_id: int) -> torch.Tensor:
    logits = torch.full((VOCAB,), -100.0)
    logits[token_id] = 100.0
    return logits


def test_a_request_comes_before_the_model_and_the_model_before_openai() -> None:
    """Each value on its own."""
    model = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert resolve(SamplingParams(), {}) == Draw(1.0, 1.0, 0, 0.0, 1.0)
    assert resolve(SamplingParams(), model) == Draw(0.6, 0.95, 20, 0.0, 1.0)
    asked = SamplingParams(temperature=0.0, top_k=0, min_p=0.1, repetition_penalty=1.2)
    assert resolve(asked, model) == Draw(0.0, 0.95, 0, 0.1, 1.2)


def test_a_models_generation_config_is_read_as_vllm_reads_it() -> None:
    """Its recommendations count, `do_sample` does not, and what it leaves open stays open."""
    network = tiny_model("llama")
    network.generation_config = GenerationConfig(
        do_sample=False, temperature=0.6, top_k=20, repetition_penalty=1.05, max_new_tokens=5
    )
    found = EmbeddedModel(network, name="tiny").sampling_defaults
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    "draw",
    [
        Draw(),
        Draw(temperature=0.5),
        Draw(top_k=1),
        Draw(top_k=7, temperature=1.7),
        Draw(top_k=1000),
        Draw(min_p=0.1),
        Draw(min_p=0.05, temperature=2.0),
        Draw(top_p=0.3),
        Draw(top_p=0.9, temperature=1.5),
        Draw(top_k=12, top_p=0.8),
        Draw(min_p=0.02, top_k=9, top_p=0.7, temperature=1.3),
    ],
)
def test_tokens_are_drawn_as_transformers_draws_them(draw: Draw) -> None:
    """The distribution is that of transformers' processors, in vLLM's order."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(draw.temperature)])
    if draw.min_p:
        steps.append(MinPLogitsWarper(draw.min_p))
    if draw.top_k:
        steps.append(TopKLogitsWarper(draw.top_k))
    if draw.top_p < 1:
        steps.append(TopPLogitsWarper(draw.top_p))
    for seed in range(5):
        logits = random_logits(seed)
        scores = steps(NO_IDS, logits.clone().unsqueeze(0))  # type: ignore[arg-type]  # plain tensors
        expected = scores[0].softmax(dim=-1)
        torch.testing.assert_close(probabilities(logits, draw), expected)


def test_repetition_counts_in_prompt_and_answer() -> None:
    """What is drawn after a prompt and some tokens is what transformers' processor lets be drawn."""
    size, prompt, answer, draws = 8, (0, 3, 3), (5, 6), 4000
    logits = random_logits(1, size) / 2
    processor = RepetitionPenaltyLogitsProcessor(1.8)
    context = torch.tensor([[*prompt, *answer]])
    expected = processor(context, logits.clone().unsqueeze(0))[0].softmax(dim=-1)

    def drawn(seed: int) -> int:
        one = sampler(prompt=prompt, seed=seed, repetition_penalty=1.8)
        for token_id in answer:
            assert one.sample(one_hot(token_id)[:size]) == token_id
        return one.sample(logits)

    counts = Counter(drawn(seed) for seed in range(draws))
    found = torch.tensor([counts[token_id] / draws for token_id in range(size)])
    noise = 4 * float((expected * (1 - expected) / draws).max().sqrt())
    torch.testing.assert_close(found, expected, atol=noise, rtol=0)
    plain = logits.softmax(dim=-1)
    assert float((plain - expected).abs().max()) > 2 * noise  # it would show if the penalty were missing


def test_frequency_and_presence_count_in_the_answer_alone() -> None:
    """As OpenAI defines them: a token of the prompt costs nothing, one of the answer each time."""
    one = sampler(prompt=(1,), temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    logits = torch.tensor([1.0, 1.4, 0.0, -5.0])
    assert [one.sample(logits) for _ in range(5)] == [1, 0, 2, 1, 0]


def test_biases_are_added_before_the_repetition_penalty() -> None:
    """As vLLM does: the other way round token 2 would stay below token 0."""
    one = sampler(prompt=(2,), temperature=0.0, repetition_penalty=2.0, logit_bias={2: 3.0, 900: 5.0})
    assert one.sample(torch.tensor([1.9, 0.0, 1.0])) == 2
    assert (
        sampler(prompt=(2,), temperature=0.0, repetition_penalty=2.0).sample(torch.tensor([0.6, 0.0, 1.0]))
        == 0
    )


def test_an_answer_does_not_end_before_its_minimum() -> None:
    """Tokens that would end it come only behind `min_tokens` others, however likely they are."""
    one = sampler(min_tokens=3, temperature=0.0, ends=(4, 7))
    logits = one_hot(4)
    logits[7], logits[9] = 90.0, 80.0
    assert [one.sample(logits) for _ in range(5)] == [9, 9, 9, 4, 4]


def test_a_grammar_that_must_end_comes_before_the_minimum() -> None:
    """Where it allows nothing but the end, the end comes."""
    one = sampler(min_tokens=3, ends=(4,))
    forbidden = torch.ones(VOCAB, dtype=torch.bool)
    forbidden[4] = False
    assert one.sample(random_logits(0), forbidden) == 4


def test_forbidden_tokens_are_never_drawn() -> None:
    """Whatever the temperature; and logits stay as they were."""
    logits = random_logits(2)
    before = logits.clone()
    forbidden = torch.arange(VOCAB) % 3 != 0
    one = sampler(temperature=2.0, seed=0, logit_bias={1: 100.0}, repetition_penalty=1.1)
    assert all(one.sample(logits, forbidden) % 3 == 0 for _ in range(300))
    torch.testing.assert_close(logits, before)


def test_the_same_seed_draws_the_same_tokens() -> None:
    """And another choice of the same request others."""

    def drawn(choice: int) -> list[int]:
        params = SamplingParams(seed=11)
        one = Sampler(params, resolve(params, {}), choice=choice, prompt=token_ids(np.array([1])), ends=())
        return [one.sample(random_logits(step)) for step in range(30)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
