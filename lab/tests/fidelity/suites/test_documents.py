"""`rag`, `reorder` and `agent`: which passages come again, and what changes in them."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvshare.replay.workloads.sources import Passage
from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.documents import agent, rag, reorder
from kvshare_lab.fidelity.suites.library import Asked, Library, marked_questions, name_of

HALVES = (Library(None, 0), Library(None, 1))
NUMBERS = range(12)


def drafts(suite: object, library: Library) -> list[Draft]:
    assert callable(suite)
    return [draft for number in NUMBERS if (draft := suite(library, number, random.Random(number)))]


def passages(messages: Messages) -> list[str]:
    """Those of a prompt of questions, each with its title."""
    return messages[1]["content"].removeprefix("Passages:\n\n").split("\n\n")[:-1]


def asked(draft: Draft, library: Library) -> Asked:
    """The question of the draft's source that the prompt ends with."""
    text = draft.prompt[1]["content"].rpartition("Question: ")[2]
    questions = (source.item for source in library.marked)
    found = next(
        each for question in questions for each in (question.whole, *question.steps) if each.text == text
    )
    assert draft.source == name_of("question", text)
    return found


@pytest.mark.parametrize("library", HALVES)
def test_supporting_passages_are_in_the_prompt_and_stored(library: Library) -> None:
    """What the answer needs can be copied from a stored prompt, and so can all passages but one."""
    for draft in drafts(rag, library):
        stored = {passage for messages in draft.stored for passage in passages(messages)}
        for needed in asked(draft, library).supporting:
            assert f"Title: {needed.title}\n{needed.text}" in stored.intersection(passages(draft.prompt))
        assert len(set(passages(draft.prompt)) - stored) <= 1


@pytest.mark.parametrize("library", HALVES)
def test_stored_prompts_asked_something_else(library: Library) -> None:
    """Two or three other questions of the half, over the draft's passages and their own."""
    known = {source.item.whole.text for source in library.marked}
    for draft in drafts(rag, library):
        questions = {messages[1]["content"].rpartition("Question: ")[2] for messages in draft.stored}
        assert questions <= known - {asked(draft, library).text}
        assert len(questions) == len(draft.stored) in (2, 3)


@pytest.mark.parametrize("suite", [rag, reorder])
def test_hops_take_turns(suite: object) -> None:
    """The label counts the passages that are needed; the gold answer is the first candidate."""
    found = drafts(suite, HALVES[0])
    assert [draft.labels["hops"] for draft in found] == [1, 2] * (len(NUMBERS) // 2)
    for draft in found:
        needed = asked(draft, HALVES[0])
        assert draft.labels["hops"] == len(needed.supporting)
        assert draft.candidates[0] == needed.answer


@pytest.mark.parametrize("library", HALVES)
def test_reorder_only_permutes(library: Library) -> None:
    """The same passages and question in three orders: stored, asked, and for the prompt's own sensitivity."""
    for draft in drafts(reorder, library):
        assert draft.reordered is not None
        orders = [passages(messages) for messages in (*draft.stored, draft.prompt, draft.reordered)]
        assert all(Counter(order) == Counter(orders[0]) for order in orders)
        assert orders[0] != orders[1] != orders[2]
        assert draft.stored[0][1]["content"].rpartition("\n\n")[2] in draft.prompt[1]["content"]


def test_yes_and_no_face_each_other() -> None:
    """A question that is answered with no has no other candidate but yes."""
    found = [draft.candidates for library in HALVES for draft in drafts(rag, library)]
    assert ("no", "yes") in found
    assert all(set(each) == {"yes", "no"} for each in found if {"yes", "no"} & set(each))


@pytest.mark.parametrize("library", HALVES)
def test_an_agents_earlier_results_change(library: Library) -> None:
    """A figure of one result, the times of one or of all; then one more call and its result."""
    for draft in drafts(agent, library):
        (before,) = draft.stored
        assert len(draft.prompt) == len(before) + 2
        pairs = zip(before, draft.prompt, strict=False)
        changed = [(old["content"], new["content"]) for old, new in pairs if old != new]
        assert len(changed) == (1 if draft.labels["refetched"] == "one" else 3)
        bodies = [(old.split("\n\n", 1)[1], new.split("\n\n", 1)[1]) for old, new in changed]
        ((old, new),) = [(old, new) for old, new in bodies if old != new]
        assert re.sub(r"\d", "", old) == re.sub(r"\d", "", new)


@pytest.mark.parametrize("library", HALVES)
def test_every_third_agent_is_asked_for_the_changed_figure(library: Library) -> None:
    """As it is now; the second candidate is what it was. Put into the gap, it gives the document's words."""
    found = drafts(agent, library)
    assert [draft.labels["asks"] for draft in found] == ["task", "task", "figure"] * (len(NUMBERS) // 3)
    for draft in found[2::3]:
        before, after = (
            "\n".join(each["content"] for each in said) for said in (draft.stored[0], draft.prompt)
        )
        gap = after.rpartition('gap?\n"')[2].removesuffix('"')
        now, stale = (
            gap.replace("___", answer.removeprefix("Done: ")[:-1]) for answer in draft.candidates[:2]
        )
        assert now in " ".join(after.split())
        assert stale in " ".join(before.split())
        assert now not in " ".join(before.split())


def write_questions(folder: Path, num: int = 40) -> None:
    """Each shares its first step, and that step's passage, with the next one; strangers come ten times."""
    rows: list[dict[str, Any]] = []
    for number in range(num):
        subject, passages = number // 2, [number // 2, 100 + number, *range(200 + number, 210 + number)]
        rows.append(
            {
                "question": f"What is the colour of the roof of the builder of house {number}?",
                "answer": f"colour{number}",
                "paragraphs": [
                    {
                        "idx": place,
                        "title": f"P{passage}",
                        "paragraph_text": f"In {1000 + passage} builder{subject} took colour{number} for it."
                        if place < 2
                        else f"In {1000 + passage} a stranger came.",
                        "is_supporting": place < 2,
                    }
                    for place, passage in enumerate(passages)
                ],
                "question_decomposition": [
                    {
                        "question": f"House {subject} >> builder",
                        "answer": f"builder{subject}",
                        "paragraph_support_idx": 0,
                    },
                    {"question": "#1 >> roof", "answer": f"colour{number}", "paragraph_support_idx": 1},
                ],
            }
        )
    for row in rows[1::2]:
        row["paragraphs"][0] = rows[rows.index(row) - 1]["paragraphs"][0]
    path = folder / "rag_full_context" / "musique_200.jsonl.gz"
    path.parent.mkdir()
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for name in ("musique_train_100", "2wikimqa_200"):
        gzip.open(path.with_name(f"{name}.jsonl.gz"), "wb").close()


@pytest.mark.parametrize("suite", [rag, reorder])
def test_halves_share_no_question_and_no_passage(suite: object, tmp_path: Path) -> None:
    """Neither what is asked, now or before, nor any passage, though the published questions share them."""
    write_questions(tmp_path)
    both = (Library(tmp_path, 0), Library(tmp_path, 1))
    steps = [{each.text for source in half.marked for each in source.item.steps} for half in both]
    assert steps[0] & steps[1]
    texts: list[set[str]] = []
    for half in both:
        found = drafts(suite, half)
        assert len(found) == len(NUMBERS)
        prompts = [messages for draft in found for messages in (*draft.stored, draft.prompt)]
        said = "\n".join(message["content"] for messages in prompts for message in messages[1:])
        texts.append({*re.findall(r"In \d{4}[^.]*\.|Question: .*", said)})
    assert min(map(len, texts)) >= 30
    assert texts[0].isdisjoint(texts[1])


def test_reads_marks_as_published(tmp_path: Path) -> None:
    """MuSiQue's paragraphs and 2WikiMultihopQA's facts; parts that refer to others are left out."""
    texts = ["Ulm lies on the Danube.", "Bo was born in Ulm.", "Cy was not."]
    rows = [
        {
            "question": "On which river was Bo born?",
            "answer": "the Danube",
            "paragraphs": [
                {"idx": idx, "title": f"P{idx}", "paragraph_text": text, "is_supporting": idx < 2}
                for idx, text in enumerate(texts)
            ],
            "question_decomposition": [
                {"question": "Bo >> place of birth", "answer": "Ulm", "paragraph_support_idx": 1},
                {"question": "#1 >> river", "answer": "the Danube", "paragraph_support_idx": 0},
            ],
        },
        {
            "question": "Were both born in Ulm?",
            "answer": "no",
            "context": [["Bo", [texts[1]]], ["Ulm", [texts[0]]], ["Cy", [texts[2]]]],
            "supporting_facts": [["Bo", 0], ["Cy", 0]],
        },
        {"question": "Without marks?", "answer": "yes"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    musique, two_wiki = marked_questions([path])
    born = Passage("P1", texts[1])
    assert musique.whole == Asked(
        "On which river was Bo born?", "the Danube", (Passage("P0", texts[0]), born)
    )
    assert musique.steps == (Asked("Bo: place of birth?", "Ulm", (born,)),)
    assert musique.others == (Passage("P2", texts[2]),)
    assert [each.title for each in two_wiki.whole.supporting] == ["Bo", "Cy"]
    assert two_wiki.others == (Passage("Ulm", texts[0]),)
