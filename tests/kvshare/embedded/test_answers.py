"""Answers of the engine with the bundled demo model: formats, ends, and what of them is stored."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, ToolChoice, ToolUse
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.lark import Grammar
from kvshare.conversation.parser import joined, parser_for
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.engine import (
    Delta,
    Event,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Started,
)
from kvshare.errors import RequestError
from kvshare.requests import Prompt
from kvshare.served_model import DEMO
from kvshare.settings import load_settings
from kvshare_lab.demo_model.pairs import near_duplicate_pairs

(PAIR,) = near_duplicate_pairs(seed=20_000, count=1)
QUESTION = Chat(tuple(PAIR.donor_messages))  # one that the demo model answers in a few tokens


class Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    kind: Literal["age", "name"]
    value: Annotated[int, Field(ge=0, le=999)]
    words: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=3)]


SCHEMA = {"x-guidance": {"whitespace_flexible": False}, **Answer.model_json_schema()}
JSON = Grammar(f"start: json\njson: %json {json.dumps(SCHEMA)}")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    settings: dict[str, object] = {"model.path": DEMO, "store.path": str(tmp_path), "index.dense": False}
    settings["cost.measure_at_start"] = False
    engine = EmbeddedEngine(load_settings(overrides={**settings, "sharing.min_prompt_tokens": 8}))
    await engine.start()
    yield engine
    await engine.stop()


class Answered:
    """What came of a request: texts and tokens of its choices, and why they ended."""

    def __init__(self, events: list[Event], num_choices: int) -> None:
        deltas = [event for event in events if isinstance(event, Delta)]
        choices = [[delta for delta in deltas if delta.choice == number] for number in range(num_choices)]
        assert isinstance(events[0], Started)
        self.report = events[0].report
        self.texts = ["".join(delta.text for delta in choice) for choice in choices]
        self.tokens = [[entry.token_id for delta in choice for entry in delta.logprobs] for choice in choices]
        self.ends = [choice[-1].finish_reason for choice in choices]


async def ask(engine: EmbeddedEngine, prompt: Prompt | None = None, **sampling: Any) -> Answered:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, "logprobs": 0, **sampling})
    events: list[Event] = []
    request = GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant="t", scope="tenant"),
        prompt=prompt or await engine.encode_chat(QUESTION),
        sampling=params,
    )
    await engine.generate(request, events.append)
    await engine.settle()
    return Answered(events, params.n)


async def test_answers_follow_their_schema_at_any_temperature(engine: EmbeddedEngine) -> None:
    """All choices are documents of it, and end by themselves."""
    for seed, temperature in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 2.0)):
        answer = await ask(engine, grammar=JSON, n=3, temperature=temperature, seed=seed)
        assert answer.ends == [FinishReason.STOP] * 3
        for text in answer.texts:
            Answer.model_validate_json(text)


async def test_a_grammar_ends_an_answer_that_ignores_the_end(engine: EmbeddedEngine) -> None:
    """Behind a complete document nothing may come, and one that is cut says so."""
    whole = await ask(engine, grammar=JSON, ignore_eos=True, min_tokens=90)
    Answer.model_validate_json(whole.texts[0])
    assert whole.ends == [FinishReason.STOP]
    cut = await ask(engine, grammar=JSON, max_tokens=3)
    assert whole.texts[0].startswith(cut.texts[0])
    assert cut.ends == [FinishReason.LENGTH]


async def test_a_bad_grammar_is_refused_before_the_answer(engine: EmbeddedEngine) -> None:
    """Nothing was emitted, and the slot is free again."""
    events: list[Event] = []
    request = GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant="t", scope="tenant"),
        prompt=await engine.encode_chat(QUESTION),
        sampling=SamplingParams(grammar=Grammar('start: json\njson: %json {"not": {}}')),
    )
    with pytest.raises(RequestError, match="Unimplemented keys") as refusal:
        await engine.generate(request, events.append)
    assert refusal.value.param == "response_format"
    assert events == []
    assert engine.status().num_running == 0


async def test_a_formatted_answer_is_stored_like_any_other(engine: EmbeddedEngine) -> None:
    """The next turn finds the prompt and all but the last of its tokens."""
    prompt = await engine.encode_chat(QUESTION)
    answer = await ask(engine, prompt, grammar=JSON)
    known = [*prompt.token_ids.tolist(), *answer.tokens[0]]
    following = await engine.encode_tokens([*known, *np.arange(20, 60)])
    assert (await ask(engine, following, max_tokens=1)).report.num_exact == len(known) - 1


async def test_calls_that_must_come_do(engine: EmbeddedEngine) -> None:
    """A model that never saw a tool calls one, with arguments of its schema, and the parser reads it."""
    parameters = {**Answer.model_json_schema(), "title": "Of the sheet"}
    tool = {"type": "function", "function": {"name": "report", "parameters": parameters}}
    chat = Chat(QUESTION.messages, (tool,), ToolChoice(ToolUse.REQUIRED), parallel_tool_calls=False)
    prompt = await engine.encode_chat(chat)
    grammar = grammar_of(chat, engine.tool_format, added_tokens=engine.added_tokens)
    for seed in range(3):
        answer = await ask(
            engine, prompt, grammar=grammar, temperature=2.0, seed=seed, skip_special_tokens=False
        )
        assert answer.ends == [FinishReason.STOP]
        parser = parser_for(chat, engine.tool_format)
        begins, arguments = joined([*parser.add(answer.texts[0]), *parser.end()])
        assert isinstance(begins, CallBegins)
        assert isinstance(arguments, CallArguments)
        assert begins.name == "report"
        Answer.model_validate_json(arguments.text)


async def test_a_stop_token_ends_an_answer_unseen(engine: EmbeddedEngine) -> None:
    """Its text is not shown; it counts as a token, and the answer says that it stopped."""
    free = await ask(engine, ignore_eos=True, max_tokens=8)
    stop = free.tokens[0][1]
    first = free.tokens[0].index(stop)
    stopped = await ask(engine, ignore_eos=True, max_tokens=8, stop_token_ids=(stop,))
    assert stopped.tokens[0] == free.tokens[0][: first + 1]
    assert stopped.texts[0] == await engine.decode_tokens(free.tokens[0][:first])
    assert stopped.ends == [FinishReason.STOP]


@pytest.mark.parametrize("param", ["stop_token_ids", "logit_bias"])
async def test_a_token_outside_the_vocabulary_is_refused(engine: EmbeddedEngine, param: str) -> None:
    """By name, before the answer; the last token of the vocabulary is not."""
    size = engine.server.model.vocab_size
    await ask(engine, None, max_tokens=1, **{param: {size - 1: 1.0}})
    with pytest.raises(RequestError, match=f"'{param}': token id {size} is not in the vocabulary") as refusal:
        await ask(engine, None, **{param: {5: 1.0, size: 1.0}})
    assert refusal.value.param == param


async def test_the_end_of_the_sequence_can_be_ignored_or_put_off(engine: EmbeddedEngine) -> None:
    """Ignored it is a token among others; put off it does not come before `min_tokens`."""
    (eos,) = engine.server.eos_token_ids
    usual = await ask(engine)
    assert usual.tokens[0][-1] == eos
    ignored = await ask(engine, ignore_eos=True, max_tokens=20)
    assert ignored.tokens[0][: len(usual.tokens[0])] == usual.tokens[0]
    assert (len(ignored.tokens[0]), ignored.ends) == (20, [FinishReason.LENGTH])
    put_off = await ask(engine, min_tokens=20, max_tokens=60)
    assert eos not in put_off.tokens[0][:20]
    assert len(put_off.tokens[0]) > 20


async def test_stop_strings_do_not_count_before_the_minimum(engine: EmbeddedEngine) -> None:
    """As in vLLM: what stands in the first `min_tokens` tokens ends nothing."""
    free = await ask(engine, ignore_eos=True, max_tokens=12)
    first = free.texts[0].strip()[:1]
    assert (await ask(engine, ignore_eos=True, max_tokens=12, stop=(first,))).ends == [FinishReason.STOP]
    shown = await ask(engine, ignore_eos=True, max_tokens=12, stop=(first,), min_tokens=11)
    assert shown.texts[0].startswith(free.texts[0][:1])
    assert len(shown.tokens[0]) >= 12


async def test_special_tokens_are_shown_on_request(engine: EmbeddedEngine) -> None:
    """Formats of tool calls are made of them."""
    grammar = Grammar('start: <|user|> "a" <|system|>')
    assert (await ask(engine, grammar=grammar)).texts == ["a"]
    shown = await ask(engine, grammar=grammar, skip_special_tokens=False)
    assert "".join(shown.texts[0].split()) == "<|user|>a<|system|>"


async def test_without_an_embedder_embeddings_are_refused(engine: EmbeddedEngine) -> None:
    """With the setting that would load one."""
    with pytest.raises(RequestError, match=r"index\.dense") as refusal:
        await engine.embed(["text"])
    assert refusal.value.code == "no_embedder"


async def test_texts_are_embedded_by_the_index_embedder(tmp_path: Path) -> None:
    """
    Unit vectors, the nearer in meaning the nearer, with the tokens of each text. One that is too long is
    refused by its place, with the limit and its tokens, in OpenAI's words.
    """
    engine = EmbeddedEngine(load_settings(overrides={"model.path": DEMO, "store.path": str(tmp_path)}))
    await engine.start()
    refusals: list[RequestError] = []
    try:
        found = await engine.embed(
            ["a cat on the mat", "a kitten on the rug", "taxes are due", "word " * 254]
        )
        for texts in (["word " * 255], ["short", "word " * 300 + "A", "word " * 400], ["word " * 99_999]):
            with pytest.raises(RequestError) as refused:
                await engine.embed(texts)
            refusals.append(refused.value)
    finally:
        await engine.stop()
    assert [refusal.param for refusal in refusals] == ["input", "input[1]", "input"]
    assert {refusal.code for refusal in refusals} == {"context_length_exceeded"}
    opening = "This model's maximum context length is 256 tokens, however you requested"
    for refusal, number in zip(
        refusals, ("257 tokens (257 in", "303 tokens (303 in", "at least "), strict=True
    ):
        assert str(refusal).startswith(f"{opening} {number}")
    assert (found.vectors.shape, found.vectors.dtype) == ((4, 384), np.dtype(np.float32))
    np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1.0, atol=1e-5)
    assert found.vectors[0] @ found.vectors[1] > found.vectors[0] @ found.vectors[2] + 0.2
    assert found.num_tokens == (7, 7, 5, 256)  # as many as it takes
