"""The suites that are made by rule: the same draft each time, right answers that the text gives."""

import json
import random
import re
from collections import Counter
from functools import cache

import pytest

from kvshare.demo import MODEL_PATH
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare_lab.fidelity.scenario import Draft, Messages, tokenized
from kvshare_lab.fidelity.suites import forms, systems
from kvshare_lab.fidelity.suites.library import Library
from kvshare_lab.fidelity.suites.slots import FORMS, published_form

SUITES = {
    "template": forms.template,
    "derived": forms.derived,
    "negation": forms.negation,
    "needle": forms.needle,
    "header": systems.header,
    "toolcall": systems.toolcall,
    "judge": systems.judge,
}
LIBRARIES = Library(None, 0), Library(None, 1)
OWN = {source.name: source.item for source in FORMS}
NUM_DRAFTS = 60
FIRST_TOOL = 5  # line of the header

EACH_SUITE = pytest.mark.parametrize("suite", SUITES)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    """The bundled model's."""
    return PromptEncoder.load(MODEL_PATH)


@cache
def drafts(suite: str, half: int = 0) -> list[Draft]:
    made = [draft_of(suite, number, half) for number in range(NUM_DRAFTS)]
    return [draft for draft in made if draft is not None]


def draft_of(suite: str, number: int, half: int = 0) -> Draft | None:
    return SUITES[suite](LIBRARIES[half], number, random.Random(f"{suite}:{number}"))


def text_of(messages: Messages) -> str:
    return "\n\n".join(message["content"] for message in messages)


def stands_in(value: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def number_of(draft: Draft, label: str) -> int:
    value = draft.labels[label]
    assert isinstance(value, int)
    return value


def num_changed_paragraphs(draft: Draft) -> int:
    before, after = (text_of(messages).split("\n\n") for messages in (draft.stored[0], draft.prompt))
    return sum(old != new for old, new in zip(before, after, strict=True))


@EACH_SUITE
def test_the_same_number_is_the_same_draft(suite: str) -> None:
    """And another one is another."""
    made = drafts(suite)
    assert [draft_of(suite, number) for number in range(10)] == made[:10]
    assert len({text_of(draft.prompt) for draft in made}) == len(made)


@EACH_SUITE
def test_nearly_every_number_is_a_draft_and_halves_share_no_source(suite: str) -> None:
    """Ten source documents or more on each side."""
    first, second = ({draft.source for draft in drafts(suite, half)} for half in (0, 1))
    assert min(len(drafts(suite, half)) for half in (0, 1)) >= 0.9 * NUM_DRAFTS
    assert min(len(first), len(second)) >= 10
    assert not first & second


@EACH_SUITE
def test_prompts_are_of_a_length_that_two_cores_can_measure(suite: str) -> None:
    """Some 300 to 1,500 tokens, in characters."""
    lengths = [len(text_of(draft.prompt)) for draft in drafts(suite)]
    assert min(lengths) >= 1100
    assert max(lengths) <= 6000


@EACH_SUITE
def test_stored_and_new_prompt_differ_and_share_most_words(suite: str) -> None:
    """Three quarters of the words of the new prompt, or there would be nothing to reuse."""
    for draft in drafts(suite):
        words = Counter(text_of(draft.prompt).split())
        for stored in draft.stored:
            assert stored != draft.prompt
            assert (words & Counter(text_of(stored).split())).total() >= 0.75 * words.total()


@EACH_SUITE
def test_candidates_differ_and_so_does_the_other_order(suite: str) -> None:
    """An order of the same words."""
    for draft in drafts(suite):
        assert len(set(draft.candidates)) == len(draft.candidates)
        if draft.reordered is not None:
            assert draft.reordered != draft.prompt
            assert sorted(text_of(draft.reordered).split()) == sorted(text_of(draft.prompt).split())


@pytest.mark.parametrize("suite", ["template", "negation", "needle"])
def test_only_the_right_value_stands_in_the_new_prompt(suite: str) -> None:
    """The old one and the others cannot be read off it; the old one stands in the stored prompt."""
    asked = [draft for half in (0, 1) for draft in drafts(suite, half) if draft.candidates]
    assert len(asked) > NUM_DRAFTS
    for draft in asked:
        right, *wrong = draft.candidates
        assert stands_in(right, text_of(draft.prompt))
        assert [value for value in wrong if stands_in(value, text_of(draft.prompt))] == []
        holds_the_second = stands_in(wrong[0], text_of(draft.stored[0]))
        assert holds_the_second is (draft.labels.get("asks") != "other")
        assert draft.expected in (None, right)


def test_half_of_the_templates_ask_for_something_that_was_not_edited() -> None:
    """A value that both prompts have, or a summary, which nobody ranks."""
    asks = Counter((draft.labels["asks"], bool(draft.candidates)) for draft in drafts("template"))
    assert asks["edited", True] == asks["other", True] + asks["other", False]
    assert asks["edited", False] == 0 < min(asks["other", True], asks["other", False])
    for draft in drafts("template"):
        if draft.labels["asks"] == "other" and draft.candidates:
            assert stands_in(draft.candidates[0], text_of(draft.stored[0]))


def test_slots_of_found_prompts_get_values_that_fit() -> None:
    """Only where the name says of what kind; others keep what both prompts have."""
    text = "${City:Ulm} {{order_date}} ${timestamp:now} {{mood}} [NAME] ${age group} ${patient_age}"
    form = published_form(text)
    assert [*form.slots] == ["City", "order_date", "patient_age"]
    values = {"City": "Bern", "order_date": "1 May 2024", "patient_age": "40"}
    assert form.filled(values, "yes") == "Bern 1 May 2024 now mood [NAME] age group 40"


def test_templates_come_from_found_prompts_too() -> None:
    """Where the library has some with named slots."""
    assert {draft.source.partition(":")[0] for draft in drafts("template")} == {"form", "text"}


def test_a_template_changes_no_more_places_than_it_says() -> None:
    """One to five of the form's slots; some drafts have a second stored prompt."""
    own = [draft for draft in drafts("template") if draft.source in OWN]
    assert all(1 <= num_changed_paragraphs(draft) <= number_of(draft, "num_slots") <= 5 for draft in own)
    assert {len(draft.stored) for draft in own} == {1, 2}


def figure_in(draft: Draft, messages: Messages) -> str:
    """The number in the sentence that something follows from."""
    pattern = re.sub(r"\\\{\w+\\\}", r"(\\d+)", re.escape(OWN[draft.source].figure.text))
    (number,) = re.findall(pattern, text_of(messages))
    return str(number)


def test_a_derived_answer_follows_from_the_figure() -> None:
    """The number itself for what is the same, and the right side of the limit where there is one."""
    kinds = Counter[str | int]()
    for draft in drafts("derived"):
        kinds[draft.labels["kind"]] += 1
        new, old = (figure_in(draft, messages) for messages in (draft.prompt, draft.stored[0]))
        answer = str if draft.labels["kind"] == "same" else OWN[draft.source].figure.limit.answer
        assert draft.candidates[:2] == (answer(new), answer(old))
        assert not stands_in(old, text_of(draft.prompt))
        assert num_changed_paragraphs(draft) == 1
    assert min(kinds[kind] for kind in ("same", "limit")) >= 10


def test_what_follows_from_the_figure_is_as_far_behind_it_as_the_label_says() -> None:
    """In words, of which 100 are some 120 tokens; a head such as `Rent (2).` counts."""
    words = {0: range(2, 8), 50: range(35, 50), 250: range(185, 230)}
    for draft in drafts("derived"):
        figure = OWN[draft.source].figure
        follows = figure.same if draft.labels["kind"] == "same" else figure.limit.text
        value = figure.text.format_map({figure.slot: figure_in(draft, draft.prompt)})
        before, found, _ = text_of(draft.prompt).partition(value)[2].partition(follows)
        assert found
        assert len(before.split()) in words[number_of(draft, "distance")]


def test_distance_alone_differs_within_three_derived_drafts() -> None:
    """The same text with the figure elsewhere, the same values, question and place of what follows."""
    made = [drafts("derived")[start : start + 3] for start in range(0, NUM_DRAFTS, 3)]
    for three in made:
        assert [draft.labels["distance"] for draft in three] == [0, 50, 250]
        assert len({(draft.source, draft.labels["kind"], draft.candidates) for draft in three}) == 1
        texts = [text_of(draft.prompt) for draft in three]
        assert len({" ".join(sorted(text.split("\n\n"))) for text in texts}) == 1
        assert len({text.index(" (2). ") for text in texts}) == 1
    assert len({str(three[0].labels["kind"]) + three[0].source for three in made}) > 10


def test_negation_changes_one_value_of_each_kind() -> None:
    """One paragraph differs, and all kinds come equally often."""
    assert Counter(draft.labels["kind"] for draft in drafts("negation")) == dict.fromkeys(forms.CHANGES, 15)
    assert {num_changed_paragraphs(draft) for draft in drafts("negation")} == {1}
    for draft in drafts("negation"):
        if draft.labels["kind"] == "decision":
            decisions = [slot.options for slot in OWN[draft.source].slots.values() if slot.options]
            assert any(set(draft.candidates[:2]) == set(options[:2]) for options in decisions)


def test_a_needle_has_seven_digits() -> None:
    """All of its candidates."""
    needles = [draft for draft in drafts("needle") if draft.labels["kind"] == "needle"]
    assert len(needles) == NUM_DRAFTS // 2
    assert all(re.fullmatch(r"\d{7}", value) for draft in needles for value in draft.candidates)


def split_header(messages: Messages) -> tuple[str, str]:
    header, _, below = text_of(messages).partition("\n\n")
    return header, below


def test_a_header_changes_on_top_only() -> None:
    """In one kind of line; the text below is the same."""
    for draft in drafts("header"):
        (before, below), (after, text) = map(split_header, (draft.stored[0], draft.prompt))
        assert text == below
        assert len({line[:6] for line in set(before.split("\n")) ^ set(after.split("\n"))}) == 1


def test_what_is_asked_about_a_header_can_be_read_off_it() -> None:
    """The new value is there and no other; of tools, the one to try first. Nobody asks for a nonce."""
    asked = [draft for draft in drafts("header") if draft.labels["asks"] == "header"]
    assert {draft.labels["kind"] for draft in asked} == {"clock", "effort", "tools", "user"}
    for draft in asked:
        before, after = (split_header(messages)[0] for messages in (draft.stored[0], draft.prompt))
        if draft.labels["kind"] == "tools":
            first = [json.loads(header.split("\n")[FIRST_TOOL])["name"] for header in (after, before)]
            assert list(draft.candidates[:2]) == first
        else:
            assert [stands_in(value, after) for value in draft.candidates] == [True, False, False, False]
            assert stands_in(draft.candidates[1], before)


def test_the_call_is_what_the_user_asked_for() -> None:
    """A defined tool, each argument as the user wrote it; the stale call is the stored prompt's."""
    for draft in drafts("toolcall"):
        right, stale = (json.loads(call) for call in draft.candidates[:2])
        definitions = [json.loads(line) for line in draft.prompt[0]["content"].split("\n") if line[:1] == "{"]
        (defined,) = (tool for tool in definitions if tool["name"] == right["name"])
        assert list(defined["parameters"]) == list(right["arguments"])
        assert draft.expected == draft.candidates[0]
        for call, messages in ((right, draft.prompt), (stale, draft.stored[0])):
            request = messages[1]["content"].partition(" Keep that ")[0]
            assert all(stands_in(str(value), request) for value in call["arguments"].values())
        (old,) = (
            stale["arguments"][name]
            for name, value in right["arguments"].items()
            if stale["arguments"][name] != value
        )
        assert not stands_in(str(old), draft.prompt[1]["content"])


def test_nearly_half_of_a_tool_call_can_be_copied_behind_the_edit(encoder: PromptEncoder) -> None:
    """The same tokens, 40 % and more of at most 3,500 characters; the right call stands nowhere."""
    for draft in drafts("toolcall") + drafts("toolcall", 1):
        scenario = tokenized(draft, encoder, suite="toolcall", number=0)
        stored, prompt = (tokens.token_ids[::-1] for tokens in (*scenario.stored, scenario.prompt))
        pairs = enumerate(zip(stored, prompt, strict=False))
        behind = next(place for place, (old, new) in pairs if old != new)
        assert 0.4 * len(prompt) <= behind
        assert len(text_of(draft.prompt)) <= 3500
        assert draft.expected is not None
        assert draft.expected not in text_of(draft.prompt)


def test_the_best_answer_agrees_with_the_text_and_the_others_do_not() -> None:
    """Sentence by sentence; each letter keeps its answer, and another one comes first."""
    for draft in drafts("judge"):
        before, after = (answers_in(messages) for messages in (draft.stored[0], draft.prompt))
        assert before == after
        assert next(iter(before)) != next(iter(after))
        assert sorted(after) == sorted(draft.candidates)
        assert len(after) == draft.labels["num_candidates"]
        text = text_of(draft.prompt).partition("Question:")[0]
        right = [letter for letter, facts in after.items() if all(fact in text for fact in facts)]
        assert right == [draft.candidates[0]]


def answers_in(messages: Messages) -> dict[str, list[str]]:
    """The facts of each answer by its letter, without the words that open it."""
    found = re.findall(r"^Answer (\w): [^.:]*: (.*)$", text_of(messages), re.M)
    return {letter: re.split(r"(?<=[.]) ", facts) for letter, facts in found}
