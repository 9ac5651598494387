"""Answers held to a grammar, on the demo model's tokenizer: they always parse; bad grammars are refused."""

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from kvshare.conversation.lark import Grammar
from kvshare.demo import MODEL_PATH
from kvshare.engines.embedded import grammar as grammar_module
from kvshare.engines.embedded.grammar import MAX_CHARS, Constraint, Grammars
from kvshare.errors import RequestError

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_PATH)
EOS = TOKENIZER.eos_token_id
VOCAB = len(TOKENIZER)
MAX_TOKENS = 2000


class Person(BaseModel):
    """Strict: a number that is written as a string is none."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]


class Report(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    state: Literal["open", "closed", "waiting"]
    people: Annotated[list[Person], Field(min_length=1, max_length=3)]
    place: Annotated[str, Field(pattern="^[0-9]{5}$")] | None
    is_urgent: bool
    weight: Annotated[int, Field(ge=0, le=9)] | Annotated[str, Field(max_length=5)]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    opened = Grammars(TOKENIZER.backend_tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])
    yield opened
    opened.close()


def of_schema(schema: object) -> Grammar:
    """JSON without white space, of which a random model would write without end."""
    compact = {"x-guidance": {"whitespace_flexible": False}, **schema} if isinstance(schema, dict) else schema
    return Grammar(f"start: json\njson: %json {json.dumps(compact)}")


def either(*names: str) -> dict[str, object]:
    return {"anyOf": [{"properties": {name: {}}} for name in names]}


def answer(constraint: Constraint, seed: int, *, temperature: float = 2.0) -> str:
    """What a model says that draws from random logits, a new set for each token."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        logits = torch.randn(VOCAB, generator=generator) * 3 / temperature
        shares = logits.masked_fill(constraint.forbidden(), -torch.inf).softmax(dim=-1)
        token_id = int(torch.multinomial(shares, 1, generator=generator))
        if token_id == EOS:
            break
        tokens.append(token_id)
        if constraint.take(token_id):
            break
    else:
        pytest.fail("the answer did not end")
    return str(TOKENIZER.decode(tokens))


@pytest.mark.parametrize("model", [Person, Report])
def test_any_answer_is_json_of_its_schema(grammars: Grammars, model: type[BaseModel]) -> None:
    """Random tokens, held to a schema, are a document that pydantic takes in its strict mode."""
    constraint = grammars.compile(of_schema(model.model_json_schema()))
    for seed in range(30):
        model.model_validate_json(answer(constraint.fork(), seed))


def test_a_complete_object_ends_the_answer(grammars: Grammars) -> None:
    """Nothing may come behind the last bracket, and no end-of-sequence token is needed to know it."""
    constraint = grammars.compile(of_schema(Person.model_json_schema()))
    tokens = TOKENIZER.encode('{"name":"Ann","age":41}', add_special_tokens=False)
    ended = []
    for token_id in tokens:
        assert not constraint.forbidden()[token_id]
        assert constraint.forbidden()[EOS]
        ended.append(constraint.take(token_id))
    assert ended == [False] * (len(tokens) - 1) + [True]


def test_an_answer_may_end_where_its_grammar_may(grammars: Grammars) -> None:
    """The end of the sequence is allowed behind a whole word, and more words are as well."""
    constraint = grammars.compile(Grammar('start: WORD (" " WORD)*\nWORD: "yes" | "no"'))
    assert constraint.forbidden()[EOS]
    for token_id in TOKENIZER.encode("yes", add_special_tokens=False):
        assert not constraint.take(token_id)
    forbidden = constraint.forbidden()
    assert not forbidden[EOS]
    assert not forbidden[TOKENIZER.encode(" no", add_special_tokens=False)[0]]
    assert constraint.take(EOS)


def test_special_tokens_can_be_part_of_a_grammar(grammars: Grammars) -> None:
    """As formats of tool calls need; their text alone is not the token."""
    special = TOKENIZER.convert_tokens_to_ids("<|user|>")
    assert isinstance(special, int)
    constraint = grammars.compile(Grammar('start: <|user|> "ok"'))
    assert (~constraint.forbidden()).nonzero().flatten().tolist() == [special]
    assert not constraint.take(special)


def test_choices_go_their_own_ways(grammars: Grammars) -> None:
    """A fork begins where its origin stands, and moves alone."""
    origin = grammars.compile(Grammar('start: "ab" | "cd"'))
    a, c = (TOKENIZER.encode(letter, add_special_tokens=False)[-1] for letter in "ac")
    before = origin.forbidden().clone()
    one, other = origin.fork(), origin.fork()
    one.take(a)
    assert torch.equal(origin.forbidden(), before)
    assert torch.equal(other.forbidden(), before)
    assert one.forbidden()[c]
    other.take(c)
    assert other.forbidden()[a]


def test_padding_of_the_vocabulary_is_never_allowed() -> None:
    """Models have more logits than tokens; the mask is as long as the logits."""
    padded = Grammars(TOKENIZER.backend_tokenizer, vocab_size=VOCAB + 100, eos_token_ids=[EOS])
    forbidden = padded.compile(Grammar("start: /(?s:.*)/")).forbidden()
    padded.close()
    assert forbidden.shape == (VOCAB + 100,)
    assert bool(forbidden[VOCAB:].all())
    assert not bool(forbidden[:VOCAB].all())


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (of_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (of_schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (of_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable schema"),
        (
            of_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
            "Unsatisfiable schema",
        ),
        (of_schema({"$ref": "#"}), "no answer follows it"),
        (of_schema({"$ref": "https://example.com/schema.json"}), "retrieving it failed"),
        (of_schema({"enum": [f"value {i}" for i in range(20_000)]}), f"expected at most {MAX_CHARS}"),
        (of_schema({"allOf": [either(f"a{i}", f"b{i}") for i in range(11)]}), "schema too large"),
        (Grammar("start: missing"), 'unknown name: "missing"'),
        (Grammar("start: ("), ""),
    ],
    ids=lambda value: None if isinstance(value, Grammar) else value[:20],
)
async def test_what_cannot_be_followed_is_refused(grammars: Grammars, grammar: Grammar, said: str) -> None:
    """With the reason, in one short line that names the field."""
    with pytest.raises(RequestError, match="the answer cannot be constrained to this format") as refusal:
        await grammars.compiled(grammar)
    assert refusal.value.param == "response_format"
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_a_grammar_with_too_many_symbols_is_too_large(grammars: Grammars) -> None:
    """Where llguidance counts no further, it says so in many lines; the client reads four words."""
    many: dict[str, Any] = {"anyOf": [{"properties": {f"{j}": {} for j in range(30)}} for _ in range(900)]}
    with pytest.raises(RequestError, match="format: it is too large;"):
        grammars.compile(of_schema(many))


async def test_a_grammar_that_takes_long_is_given_up(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets an error in time, and the event loop runs on meanwhile."""
    monkeypatch.setattr(grammar_module, "_COMPILE_S", 0.01)
    slow = of_schema({"type": "object", "properties": {str(i): {} for i in range(2000)}})
    compiling = asyncio.create_task(grammars.compiled(slow))
    turns = 0
    while not compiling.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 1
    with pytest.raises(RequestError, match="more than 0 s to compile"):
        await compiling
