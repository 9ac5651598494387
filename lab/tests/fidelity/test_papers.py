"""The papers' tables: scores by hand, prompts as in the papers, and the command over data of our own."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU

from kvshare.conversation.chat import Chat
from kvshare.errors import ConfigError
from kvshare.served_model import FORMS_MODEL
from kvshare.settings import load_settings
from kvshare_lab.bench import papers
from kvshare_lab.fidelity import measures
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.layered import greedy_answers
from kvshare_lab.fidelity.measures import jaccard, token_f1
from kvshare_lab.fidelity.papers import prompts
from kvshare_lab.fidelity.papers.answers import FULL, Answerer, Arm, Sheet, timed
from kvshare_lab.fidelity.papers.prompts import REQUESTS, Asked, Writer
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.stored_prompts import prefill

KVSHARE = Arm("kvshare")
PLACES = ("Aldermoor", "Tarrow", "Ebbing", "Penwick", "Saltby", "Hollin", "Marrick", "Oakham")


def passage(number: int) -> str:
    """Different for each number."""
    place, other = PLACES[number % 8], PLACES[(number + 3) % 8]
    return f"The bridge of {place}, built in {1800 + number} by a firm of {other}, is {number + 20} m long."


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets in their published formats, six rows each."""
    folder = tmp_path_factory.mktemp("data")
    blend = [
        {
            "question": f"When was the bridge of {PLACES[row]} built?",
            "answers": [[str(1800 + row)]],
            "ctxs": [{"title": "", "text": passage(place)} for place in range(5)],
        }
        for row in range(6)
    ]
    write(folder / "rag_cacheblend/wikimqa_s_clean.jsonl.gz", blend)
    hops = [
        {
            "question": "How long is the bridge by the firm's neighbours?",
            "answer": str(row + 20),
            "paragraphs": [
                {"idx": n, "title": PLACES[n], "paragraph_text": passage(n), "is_supporting": n in (2, 4)}
                for n in range(6)
            ],
            "question_decomposition": [
                {"question": f"{PLACES[row]} >> bridge", "answer": str(row + 20), "paragraph_support_idx": 4}
            ],
        }
        for row in range(6)
    ]
    write(folder / "rag_full_context/musique_200.jsonl.gz", hops)
    segments = [{"src": f"Brücke {n} steht in {PLACES[n % 8]}.", "ref": passage(n)} for n in range(12)]
    write(folder / "wmt19/newstest2019.de-en.jsonl.gz", segments)
    return folder


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    """The bundled model."""
    laboratory = Laboratory.open(FORMS_MODEL, load_settings(), data=None, noise=False)
    return Answerer(laboratory.model, laboratory.encoder, laboratory.settings)


def test_bleu_of_summed_counts_is_that_of_the_corpus() -> None:
    """Also for Chinese, which is split into characters."""
    for language, tokenize in (("en", "13a"), ("zh", "zh")):
        found = ["the old bridge is long and wide", "威尔士议会议员今天开会"]
        wanted = ["the old bridge was long and very wide", "威尔士议会的议员今天开会"]
        counts = [measures.bleu_counts(w, f, language=language) for w, f in zip(wanted, found, strict=True)]
        corpus = BLEU(tokenize=tokenize).corpus_score(found, [wanted]).score
        assert measures.corpus_bleu(np.stack(counts)[None])[0] == pytest.approx(corpus / 100)
    assert measures.bleu_counts("今天开会", "今天开会", language="zh")[-1] == 4  # characters


def test_scores_of_answers() -> None:
    """Longest common sequence, words without articles and punctuation, the best of several references."""
    assert measures.rouge_l("the cat sat down", "the cat lay down") == pytest.approx(0.75)
    assert measures.rouge_l("", "") == 1.0
    assert measures.best(token_f1, ["the Exeter College", "Exeter"], "Exeter.") == 1.0
    assert measures.best(token_f1, ["Exeter College"], "Exeter") == pytest.approx(2 / 3)
    assert measures.best(jaccard, ["red car"], "a red bus") == pytest.approx(1 / 3)


def test_a_sheet_has_means_with_intervals_and_paired_differences() -> None:
    """A constant loss against `full` has no width, however much prompts differ."""
    sheet = Sheet("X")
    for value in (0.2, 0.5, 0.9, 0.4):
        sheet.add("full", 0.0, {"f1": value})
        sheet.add("random", 0.1, {"f1": value - 0.1})
    full, other = sheet.rows(compared=("f1",), seed=1)
    assert full["f1"]["mean"] == pytest.approx(0.5)
    assert 0.2 <= full["f1"]["low"] < 0.5 < full["f1"]["high"] <= 0.9
    assert (other["n"], other["budget"]) == (4, 0.1)
    assert "f1_minus_full" not in full
    assert other["f1_minus_full"] == pytest.approx({"mean": -0.1, "low": -0.1, "high": -0.1})


def test_supporting_passages_stand_first_and_the_answer_marks_them(folder: Path) -> None:
    """CacheBlend's file marks none; MuSiQue's single hop has the passage of its first step."""
    asked = prompts.cacheblend(folder, "wikimqa_s_clean", piece_words=40)[2]
    assert "1802" in asked.passages[0]
    assert (len(asked.passages), asked.answers) == (5, ("1802",))
    assert prompts.marked(folder, "musique")[0].passages[1].startswith("Saltby: ")
    single = prompts.single_hop(folder, "musique")[1]
    assert single.passages[0].startswith("Saltby: ")
    assert "Tarrow" in single.text
    assert prompts.marked(folder, "2wikimqa") == []


def test_a_step_of_several_questions_is_asked_once(tmp_path: Path) -> None:
    """MuSiQue builds several questions on one first step."""
    step = {"question": "Ulm >> river", "answer": "the Danube", "paragraph_support_idx": 0}
    row = {
        "paragraphs": [{"idx": 0, "title": "Ulm", "paragraph_text": "On the Danube.", "is_supporting": True}],
        "question_decomposition": [step],
    }
    other = {**row, "question_decomposition": [{**step, "question": "Ulm >> country"}]}
    write(tmp_path / "rag_full_context/musique_200.jsonl.gz", [row, other, row])
    questions = prompts.single_hop(tmp_path, "musique")
    assert len({asked.text for asked in questions}) == len(questions) == 2


def test_a_false_statement_is_false() -> None:
    """Not another accepted answer, however it is written; yes faces no."""

    def asked(*answers: str) -> Asked:
        return Asked("?", (), answers)

    others = [asked("the ulm."), asked("no"), asked("Bern")]
    assert prompts.wrong_answer(asked("The town", "Ulm"), others) == "Bern"
    assert prompts.wrong_answer(asked("Bern"), others) == "the ulm."
    assert prompts.wrong_answer(asked("Bern", "Ulm"), others) is None
    assert (prompts.wrong_answer(asked("Yes"), others), prompts.wrong_answer(asked("no"), [])) == (
        "no",
        "yes",
    )


def test_long_chunks_are_cut_into_even_pieces(folder: Path) -> None:
    """None is longer than asked for, and no word is lost."""
    asked = prompts.cacheblend(folder, "wikimqa_s_clean", piece_words=10)[0]
    assert max(len(piece.split()) for piece in asked.passages) <= 10
    assert sorted(" ".join(asked.passages).split()) == sorted(
        " ".join(passage(place) for place in range(5)).split()
    )


def test_samsum_is_read_as_published(tmp_path: Path) -> None:
    """Line ends of its dialogues are no paragraphs; another file is refused."""
    path = tmp_path / "train.json"
    path.write_text('[{"id": "1", "dialogue": "A: Hi\\r\\n\\r\\nB: Yo", "summary": "A greets B."}]')
    assert prompts.samsum(path) == [prompts.Pair("A: Hi\nB: Yo", "A greets B.")]
    path.write_text('[{"id": "1", "text": "A: Hi"}]')
    with pytest.raises(ConfigError, match="--samsum"):
        prompts.samsum(path)


def test_prompts_are_cut_to_their_length(answerer: Answerer) -> None:
    """Supporting passages stay; the oldest examples go first."""
    asked = Asked("Where?", tuple(passage(number) for number in range(9)), ("Tarrow",))
    length = len(
        answerer.encoder.encode_chat(Chat(tuple(prompts.with_passages(asked.passages[:4], "x")))).token_ids
    )
    writer = Writer(answerer.encoder, length + 60)
    kept = writer.passages(asked, 9, random.Random(1))
    assert {passage(0), passage(1)} <= set(kept)
    assert len(kept) < 9
    pairs = [prompts.Pair(f"Satz {number}", passage(number)) for number in range(8)]
    examples, chat = Writer(answerer.encoder, 260).few_shot(pairs, 7, REQUESTS["de-en"])
    assert len(answerer.encoder.encode_chat(Chat(tuple(chat))).token_ids) <= 260
    assert 1 <= len(examples) < 5
    assert examples[-1][1]["content"] == passage(6)
    assert chat[-1]["content"] == "Translate from German to English: Satz 7"


def test_earlier_prompts_have_all_passages_between_them() -> None:
    """In another order, with another question and other passages."""
    chunks = [passage(number) for number in range(5)]
    others = [Asked(f"Why {n}?", tuple(passage(10 * n + k) for k in range(5)), ("x",)) for n in (1, 2)]
    first, second = prompts.earlier(chunks, others, random.Random(3))
    texts = [message[0]["content"].split("\n\n") for message in (first, second)]
    assert set(chunks) <= set(texts[0]) | set(texts[1])
    assert all(0 < len(set(chunks) & set(text)) < 5 and len(text) == 7 for text in texts)


def test_answers_written_together_are_those_written_alone(answerer: Answerer) -> None:
    """Several arms' KV in one buffer do not see each other, and each ends where it ends."""
    writer = Writer(answerer.encoder, 400)
    arms = []
    for question in ("When was it built?", "How long is the bridge of Tarrow?", "Who?"):
        chat = prompts.with_passages([passage(1), passage(2)], question)
        arms.append(prefill(answerer.model, writer.scenario(chat, [], suite="x", number=0).prompt))
    size = min(len(done.prompt) for done in arms)
    starts = [(done.kv, done.first) for done in arms]
    together = greedy_answers(answerer.model, starts, num_tokens=size, limit=8)
    for start, found in zip(starts, together, strict=True):
        (alone,) = greedy_answers(answerer.model, [start], num_tokens=size, limit=8)
        assert found.tolist() == alone.tolist()


def test_the_servers_arm_makes_the_servers_plan(answerer: Answerer) -> None:
    """Copied in place behind a small edit; its cost is the plan's, and a prompt unlike any is computed."""
    writer = Writer(answerer.encoder, 1000)
    chunks = [passage(number) for number in range(8)]
    stored = prompts.with_passages([passage(20), *chunks], "When?")
    new = prompts.with_passages([passage(30), *chunks], "When?")
    scenario = writer.scenario(new, [stored], suite="x", number=0)
    stored_prompts = answerer.store(scenario.stored)
    trial = answerer.trial(scenario, stored_prompts)
    assert trial is not None
    plan = stored_prompts.plan(scenario.prompt.token_ids, answerer.settings)
    found = answerer.answers(trial, (FULL, KVSHARE), limit=2, turn=1)
    assert found[KVSHARE].is_approximate is True
    assert found[KVSHARE].computed == pytest.approx(plan.charged_budget)  # type: ignore[union-attr]  # a plan
    assert found[FULL].computed == 1.0
    assert found[Arm("full", "full")] is found[FULL]


def test_the_clock_changes_nothing_that_an_arm_computes(answerer: Answerer) -> None:
    """A rule's own start, such as the fresh first layers of CacheBlend's probe, is not overwritten."""
    writer = Writer(answerer.encoder, 1000)
    chunks = [passage(number) for number in range(6)]
    prompt = prompts.with_passages(chunks, "When?")
    scenario = writer.scenario(
        prompt, [prompts.with_passages((), chunk) for chunk in chunks], suite="x", number=0
    )
    trial = answerer.trial(scenario, answerer.store(scenario.stored))
    assert trial is not None
    selection = RULES["cacheblend"].choose(trial, 0.15)
    assert selection.kv is not None
    outcome, seconds = timed(trial, selection)
    plain = trial.run(selection, forced=False)
    assert torch.equal(outcome.kv.k[:, : trial.num_tokens], plain.kv.k[:, : trial.num_tokens])
    assert torch.equal(outcome.log_probabilities, plain.log_probabilities)
    assert seconds > 0


def test_the_command_makes_all_tables(folder: Path, tmp_path: Path) -> None:
    """Every paper's arms, for the data sets that are there; the others are named."""
    samsum = tmp_path / "samsum.json"
    talks = [{"id": str(n), "dialogue": passage(n), "summary": passage(n + 1)} for n in range(8)]
    samsum.write_text(json.dumps(talks))
    document = papers.run(
        model="demo", data=folder, samsum=samsum, rows=1, prompt_tokens=500, answer_tokens=3, seed=1
    )
    tables = document["tables"]
    arms = {name: {(row["data"], row["arm"]) for row in rows} for name, rows in tables.items()}
    assert {arm for name, arm in arms["kvshare-1"] if name == "WMT19 de-en"} == {
        "full",
        "prefix",
        "response",
        "kvshare",
    }
    assert ("2WikiMQA", "cacheblend") in arms["cacheblend-12"]
    assert ("SAMSum", "full-reuse") in arms["cacheblend-12"]
    assert ("MuSiQue, single hop", "set-cache") in arms["cachecraft-21"]
    full = next(row for row in tables["cachecraft-20"] if row["arm"] == "full")
    assert full["rouge_l"]["mean"] == 1.0
    budgets = [row["budget"] for row in tables["cachecraft-20"] if row["arm"] == "cache-craft"]
    assert budgets[:3] == [0.1, 0.2, 0.3]
    assert {"WMT19 zh-en", "2WikiMQA", "MuSiQue (CacheBlend)"} <= set(document["absent"])
    assert "no quality figures" in document["note"]


def test_wrong_options_are_refused(folder: Path) -> None:
    """A table that there is not, and data that are not there."""
    with pytest.raises(ConfigError, match="--tables"):
        papers.run(model="demo", data=folder, tables="kvshare-2")
    with pytest.raises(ConfigError, match="--data"):
        papers.run(model="demo", data=folder / "none")
