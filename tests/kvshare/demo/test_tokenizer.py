"""The tokenizer that ships with the demo model, and its chat template."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvshare.demo import MODEL_PATH


@cache
def bundled() -> PreTrainedTokenizerFast:
    """The tokenizer in the bundled folder."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)
    return tokenizer


def chat(*contents: str, generate: bool = False) -> str:
    """A chat of a system message and then user and assistant in turn, as text."""
    roles = ["system", *(("user", "assistant") * len(contents))]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    text = bundled().apply_chat_template(messages, add_generation_prompt=generate, tokenize=False)
    assert isinstance(text, str)
    return text


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip(text: str) -> None:
    """Whatever a user writes comes back unchanged, whole words or bytes."""
    if any(token in text for token in bundled().all_special_tokens):
        return
    assert bundled().decode(bundled().encode(text)) == text


@pytest.mark.parametrize("before", ["", " "])
def test_numbers_are_single_tokens(before: str) -> None:
    """A number from 0 to 99 is one token, so that an answer is copied, not spelled."""
    assert all(len(bundled().encode(f"{before}{number}")) == 1 for number in range(100))


def test_an_answer_is_the_same_tokens_as_its_value_on_the_form() -> None:
    """The template puts the space before an answer that a slot line has before its value."""
    ids = bundled().encode(chat("S", "Q", "Anna Keller"))
    value = bundled().encode(" Anna Keller")
    line = bundled().encode("Report 2, patient: Anna Keller\n")
    assert ids[-len(value) - 1 : -1] == value
    assert line[-len(value) - 1 : -1] == value


def test_generation_prompt_is_a_prefix_of_the_answered_chat() -> None:
    """A turn that was generated and a turn that is sent back are the same tokens."""
    asked, answered = chat("S", "Q", generate=True), chat("S", "Q", "47")
    assert answered == f"{asked} 47<|end|>"


def test_many_turns_alternate() -> None:
    """A conversation keeps every turn in order."""
    text = chat("S", "Q1", "A1", "Q2", generate=True)
    assert text == (
        "<|begin|><|system|>\nS<|end|><|user|>\nQ1<|end|><|assistant|> A1<|end|>"
        "<|user|>\nQ2<|end|><|assistant|>"
    )


def test_unknown_role_is_refused() -> None:
    """The template says which role it does not know."""
    with pytest.raises(TemplateError, match="tool"):
        bundled().apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_auto_tokenizer_loads_the_same_one() -> None:
    """The folder loads by name like any Hugging Face model."""
    auto = AutoTokenizer.from_pretrained(MODEL_PATH)
    assert auto.encode("Report 2, sodium: 47") == bundled().encode("Report 2, sodium: 47")
    assert auto.eos_token == "<|end|>"
