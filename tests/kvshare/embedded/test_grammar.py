"""Answers held to a grammar, on the demo model's tokenizer: they always parse; bad grammars are refused."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from kvshare.conversation.lark import Grammar
from kvshare.demo import MODEL_PATH
from kvshare.embedded.grammar import ConstrainedChoice, Constraint, Grammars, GrammarState
from kvshare.errors import UnsupportedFormatError
from kvshare.grammar_pool.limits import MAX_CHARS

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


Compiled = Callable[[Grammar], Awaitable[Constraint]]


@pytest.fixture
def compiled(grammars: Grammars) -> Iterator[Compiled]:
    """Compiles; what it compiled is closed after the test."""
    opened: list[Constraint] = []

    async def compiled_(grammar: Grammar) -> Constraint:
        opened.append(await grammars.compiled(grammar))
        return opened[-1]

    yield compiled_
    for constraint in opened:
        constraint.close()


def of_schema(schema: object) -> Grammar:
    """JSON without white space, of which a random model would write without end."""
    compact = {"x-guidance": {"whitespace_flexible": False}, **schema} if isinstance(schema, dict) else schema
    return Grammar(f"start: json\njson: %json {json.dumps(compact)}")


def either(*names: str) -> dict[str, object]:
    return {"anyOf": [{"properties": {name: {}}} for name in names]}


def forbidden_next(choice: ConstrainedChoice) -> torch.Tensor:
    """The mask, when its process has found it."""
    while (forbidden := choice.forbidden()) is None:
        time.sleep(0.001)
    return forbidden


def takes(choice: ConstrainedChoice, token_id: int) -> bool:
    """Take a token. Returns whether the answer is complete."""
    choice.take(token_id)
    while (state := choice.state()) is GrammarState.PENDING:
        time.sleep(0.001)
    return state is GrammarState.ENDED


def answer(choice: ConstrainedChoice, seed: int, *, temperature: float = 2.0) -> str:
    """What a model says that draws from random logits, a new set for each token."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        logits = torch.randn(VOCAB, generator=generator) * 3 / temperature
        shares = logits.masked_fill(forbidden_next(choice), -torch.inf).softmax(dim=-1)
        token_id = int(torch.multinomial(shares, 1, generator=generator))
        if token_id == EOS:
            break
        tokens.append(token_id)
        if takes(choice, token_id):
            break
    else:
        pytest.fail("the answer did not end")
    return str(TOKENIZER.decode(tokens))


@pytest.mark.parametrize("model", [Person, Report])
async def test_any_answer_is_json_of_its_schema(compiled: Compiled, model: type[BaseModel]) -> None:
    """Random tokens, held to a schema, are a document that pydantic takes in its strict mode."""
    constraint = await compiled(of_schema(model.model_json_schema()))
    for seed in range(30):
        model.model_validate_json(answer(constraint.choice(seed), seed))


async def test_a_complete_object_ends_the_answer(compiled: Compiled) -> None:
    """Nothing may come after the last bracket, and no end-of-sequence token is needed to know it."""
    choice = (await compiled(of_schema(Person.model_json_schema()))).choice(0)
    tokens = TOKENIZER.encode('{"name":"Ann","age":41}', add_special_tokens=False)
    ended = []
    for token_id in tokens:
        assert not forbidden_next(choice)[token_id]
        assert forbidden_next(choice)[EOS]
        ended.append(takes(choice, token_id))
    assert ended == [False] * (len(tokens) - 1) + [True]


async def test_an_answer_may_end_where_its_grammar_may(compiled: Compiled) -> None:
    """The end of the sequence is allowed after a whole word, and more words are as well."""
    grammar = Grammar('start: WORD (" " WORD)*\nWORD: "yes" | "no"')
    choice = (await compiled(grammar)).choice(0)
    assert forbidden_next(choice)[EOS]
    for token_id in TOKENIZER.encode("yes", add_special_tokens=False):
        assert not takes(choice, token_id)
    forbidden = forbidden_next(choice)
    assert not forbidden[EOS]
    assert not forbidden[TOKENIZER.encode(" no", add_special_tokens=False)[0]]
    assert takes(choice, EOS)


async def test_special_tokens_can_be_part_of_a_grammar(compiled: Compiled) -> None:
    """As formats of tool calls need; their text alone is not the token."""
    special = TOKENIZER.convert_tokens_to_ids("<|user|>")
    assert isinstance(special, int)
    choice = (await compiled(Grammar('start: <|user|> "ok"'))).choice(0)
    assert (~forbidden_next(choice)).nonzero().flatten().tolist() == [special]
    assert not takes(choice, special)


async def test_choices_go_their_own_ways(compiled: Compiled) -> None:
    """Each begins in the first state, also when others have moved, and moves alone."""
    constraint = await compiled(Grammar('start: "ab" | "cd"'))
    a, c = (TOKENIZER.encode(letter, add_special_tokens=False)[-1] for letter in "ac")
    first, second = constraint.choice(0), constraint.choice(1)
    before = forbidden_next(second).clone()
    takes(first, a)
    assert torch.equal(forbidden_next(second), before)
    assert forbidden_next(first)[c]
    takes(second, c)
    assert forbidden_next(second)[a]
    assert torch.equal(forbidden_next(constraint.choice(2)), before)


async def test_padding_of_the_vocabulary_is_never_allowed() -> None:
    """Models have more logits than tokens; the mask is as long as the logits."""
    padded = Grammars(TOKENIZER.backend_tokenizer, vocab_size=VOCAB + 100, eos_token_ids=[EOS])
    constraint = await padded.compiled(Grammar("start: /(?s:.*)/"))
    forbidden = forbidden_next(constraint.choice(0))
    constraint.close()
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
        (of_schema({"type": "string", "pattern": "(a"}), "regex parse error: unclosed group"),
        (of_schema({"type": "string", "pattern": "(?<=a)b"}), "look-behind, is not supported"),
        (Grammar("start: missing"), 'unknown name: "missing"'),
        (Grammar("start: ("), ""),
    ],
    ids=lambda value: None if isinstance(value, Grammar) else value[:20],
)
async def test_what_cannot_be_followed_is_refused(grammars: Grammars, grammar: Grammar, said: str) -> None:
    """With the reason, in one short line that names the field."""
    with pytest.raises(
        UnsupportedFormatError, match="the answer cannot be constrained to this format"
    ) as refusal:
        await grammars.compiled(grammar)
    assert refusal.value.param == "response_format"
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


async def test_an_ambiguous_grammar_is_refused_before_the_answer(grammars: Grammars) -> None:
    """It compiles, and its first mask exceeds the limits of llguidance: what 400 schemas have in common."""
    many: dict[str, Any] = {"anyOf": [{"properties": {f"{j}": {} for j in range(30)}} for _ in range(400)]}
    with pytest.raises(UnsupportedFormatError, match=r"too long to find which tokens|took more than"):
        await grammars.compiled(of_schema(many))
