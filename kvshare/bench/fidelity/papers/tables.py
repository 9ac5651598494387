"""One function per paper's table: the data sets that are there x the arms that the paper compares."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshare.bench.fidelity.papers import data, prompts, scores
from kvshare.bench.fidelity.papers.answers import FULL, KVSHARE, PREFIX, Answer, Arm, Server
from kvshare.bench.fidelity.papers.data import Asked, Pair
from kvshare.bench.fidelity.papers.prompts import QUESTIONS, Wording, Writer, with_passages
from kvshare.bench.fidelity.papers.scores import Sheet
from kvshare.bench.fidelity.scenario import Messages
from kvshare.bench.fidelity.shelf import Shelf, prefill
from kvshare.bench.fidelity.trial import Trial
from vector_index import Embedder

log = logging.getLogger(__name__)

DIRECTIONS = ("de-en", "en-de", "zh-en", "en-zh")
_MOST_ALONE, _MOST_REUSED = 10, 5  # passages of a prompt: top-k of CacheBlend and of Cache-Craft
_NUM_STORED = 2  # earlier prompts, of which a new one may copy
_SHORT, _ONE_WORD = 12, 4  # tokens of an answer that is asked to be short
_TOKENS_A_WORD = 1.4
_PIECES = 8  # in a prompt, at most _LONGEST_PIECE tokens each
_LONGEST_PIECE = 512

_REPAIRS = (
    *(Arm("random", "random", budget) for budget in (0.1, 0.2, 0.3)),
    *(Arm("most-attended", "most-attended", budget) for budget in (0.1, 0.2, 0.3)),
    *(Arm("cache-craft", "cache-craft", budget) for budget in (0.1, 0.2, 0.3)),
)
_TABLE_1 = (FULL, PREFIX, KVSHARE)
_FIGURE_12 = (FULL, PREFIX, Arm("full-reuse", "placeholders"), Arm("cacheblend", "cacheblend", 0.15), KVSHARE)
_FIGURE_20 = (
    FULL,
    PREFIX,
    Arm("full-cache", "placeholders"),
    Arm("set-cache", "set-cache"),
    *_REPAIRS,
    KVSHARE,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all tables are made with. `samsum`: the user's own copy."""

    server: Server
    writer: Writer
    data: Path
    samsum: Path | None
    rows: int
    answer_tokens: int
    seed: int
    absent: list[str] = field(default_factory=list)  # data sets that are not there

    def draw(self, name: str, number: int = 0) -> random.Random:
        """The same for the same options."""
        return random.Random(f"{self.seed}:{name}:{number}")

    def is_there(self, name: str, items: Sequence[object]) -> bool:
        """Whether there is a data set; one that is not is noted."""
        if not items and name not in self.absent:
            self.absent.append(name)
        return bool(items)


def kvshare_1(bench: Bench) -> list[dict[str, Any]]:
    """KVShare, table 1: translation and summaries, beside returning an earlier answer."""
    found = []
    for languages in DIRECTIONS:
        pairs = data.wmt19(bench.data, languages)
        if bench.is_there(f"WMT19 {languages}", pairs):
            language = languages.rpartition("-")[2]
            stream = _Stream(bench, f"WMT19 {languages}", pairs, Wording.of_translation(languages))
            found += stream.measured("bleu", language)
    pairs = data.samsum(bench.samsum) if bench.samsum else []
    if bench.is_there("SAMSum", pairs):
        found += _Stream(bench, "SAMSum", pairs, Wording.of_summary()).measured("rouge_l", "en")
    return found


class _Stream:
    """Pairs one after another, each asked for with those before as examples."""

    def __init__(self, bench: Bench, name: str, pairs: Sequence[Pair], wording: Wording) -> None:
        self._bench, self._name, self._pairs, self._wording = bench, name, pairs, wording
        self._embedder = Embedder()
        self._vectors: list[NDArray[np.float32]] = []
        self._asked: list[int] = []  # numbers of pairs
        self._answers: list[str] = []  # the full prefill's

    def measured(self, measure: str, language: str) -> list[dict[str, Any]]:
        """Rows of the table. The first two prompts are only stored."""
        sheet, wanted = Sheet(self._name), self._bench.rows + _NUM_STORED
        last = max(prompts.EXAMPLES, len(self._pairs) - wanted)
        start = self._bench.draw(self._name).randint(prompts.EXAMPLES, last)
        for number in range(start, min(start + wanted, len(self._pairs))):
            for arm, answer in self._answered(number, sheet).items():
                figures = _figures(measure, self._pairs[number].result, answer.text, language)
                sheet.add(arm.name, 0.0, figures | _costs(arm, answer))
        return sheet.rows(compared=(measure,), seed=self._bench.seed)

    def _answered(self, number: int, sheet: Sheet) -> dict[Arm, Answer]:
        """By every arm; of prompts that are only stored none."""
        server, limit = self._bench.server, self._bench.answer_tokens
        scenario = self._bench.writer.scenario(self._prompt(number), [], suite=self._name, number=number)
        near = self._most_similar(number)
        self._asked.append(number)
        if len(near) < _NUM_STORED:
            self._answers.append(server.full_answer(prefill(server.model, scenario.prompt), limit))
            return {}
        stored = [self._prompt(self._asked[place]) for place in reversed(near)]  # the nearest is the newest
        scenario = self._bench.writer.scenario(self._prompt(number), stored, suite=self._name, number=number)
        trial = server.trial(scenario, server.store(scenario.stored))
        if trial is None:
            self._answers.append(server.full_answer(prefill(server.model, scenario.prompt), limit))
            sheet.skipped += 1
            return {}
        found = server.answers(trial, _TABLE_1, limit=limit, turn=number)
        self._answers.append(found[FULL].text)
        response = Answer(self._answers[near[0]], 0.0, 0.0, 0.0)
        log.info("%s: prompt %d answered", self._name, number)
        return {**found, Arm("response", None): response}

    def _prompt(self, number: int) -> Messages:
        return self._bench.writer.few_shot(self._pairs, number, self._wording)[1]

    def _most_similar(self, number: int) -> list[int]:
        """Places of the earlier prompts whose text means most nearly the same, the nearest first."""
        text = "\n".join(message["content"] for message in self._prompt(number))
        vector = self._embedder.embed([text])[0]
        near = sorted(range(len(self._vectors)), key=lambda place: -float(self._vectors[place] @ vector))
        self._vectors.append(vector)
        return near[:_NUM_STORED]


def cacheblend_12(bench: Bench) -> list[dict[str, Any]]:
    """CacheBlend, figure 12: quality and time to first token, every passage cached alone."""
    found = []
    words = int(min(_LONGEST_PIECE, bench.writer.longest / _PIECES) / _TOKENS_A_WORD)
    for name, file in (("2WikiMQA", "wikimqa_s_clean"), ("MuSiQue", "musique_s")):
        questions = data.cacheblend(bench.data, file, piece_words=words)
        if bench.is_there(f"{name} (CacheBlend)", questions):
            sheet = Sheet(name)
            for number, asked in _drawn(bench, file, questions):
                _add_question(bench, sheet, number, asked)
            found += sheet.rows(compared=("f1",), seed=bench.seed)
    pairs = data.samsum(bench.samsum) if bench.samsum else []
    if bench.is_there("SAMSum", pairs):
        found += _summaries(bench, pairs)
    return found


def _add_question(bench: Bench, sheet: Sheet, number: int, asked: Asked) -> None:
    chunks = bench.writer.passages(asked, _MOST_ALONE, bench.draw(sheet.data, number))
    prompt = with_passages(chunks, QUESTIONS["short"].format(question=asked.text))
    alone = prompts.alone(chunks)
    for arm, answer, costs in _asked_12(bench, sheet, number, prompt, alone):
        f1 = scores.best_f1(asked.answers, _first_line(answer.text))
        sheet.add(arm.name, arm.budget, {"f1": f1} | costs)


def _summaries(bench: Bench, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    sheet, wording = Sheet("SAMSum"), Wording.of_summary()
    behind = range(prompts.EXAMPLES, len(pairs))
    chosen = bench.draw("SAMSum 12").sample(behind, min(bench.rows, len(behind)))
    for number in chosen:
        examples, prompt = bench.writer.few_shot(pairs, number, wording)
        for arm, answer, costs in _asked_12(bench, sheet, number, prompt, examples):
            figures = _figures("rouge_l", pairs[number].result, answer.text, "en")
            sheet.add(arm.name, arm.budget, figures | costs)
    return sheet.rows(compared=("rouge_l",), seed=bench.seed)


def _asked_12(
    bench: Bench, sheet: Sheet, number: int, prompt: Messages, alone: Sequence[Messages]
) -> Iterator[tuple[Arm, Answer, dict[str, float]]]:
    """Every arm's answer, and its costs with the time to the first token."""
    scenario = bench.writer.scenario(prompt, alone, suite=sheet.data, number=number)
    trial = bench.server.trial(scenario, bench.server.store(scenario.stored))
    if trial is None:
        sheet.skipped += 1
        return
    found = bench.server.answers(trial, _FIGURE_12, limit=bench.answer_tokens, turn=number)
    log.info("%s: prompt %d answered", sheet.data, number)
    for arm, answer in found.items():
        seconds = {"ttft_s": answer.seconds, "ttft_of_full": answer.seconds / found[FULL].seconds}
        yield arm, answer, _costs(arm, answer) | seconds


def cachecraft(bench: Bench) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Cache-Craft, figures 20 and 21: likeness to the full prefill's answer, by budget."""
    long, short = [], []
    sets = (("MuSiQue", data.musique), ("MuSiQue, single hop", data.single_hop), ("2WikiMQA", data.two_wiki))
    for name, read in sets:
        questions = read(bench.data)
        if not bench.is_there(name, questions):
            continue
        sheets = {task: Sheet(name, task) for task in ("long", "short", "statement")}
        for number, asked in _drawn(bench, name, questions):
            others = bench.draw(f"{name} others", number).sample(
                [other for other in questions if other is not asked], _NUM_STORED
            )
            _Reuse(bench, sheets, number, asked, others).add()
            log.info("%s: prompt %d answered", name, number)
        long += sheets["long"].rows(seed=bench.seed)
        short += sheets["short"].rows(compared=("jaccard_reference",), seed=bench.seed)
        short += sheets["statement"].rows(compared=("accuracy",), seed=bench.seed)
    return long, short


@dataclass(frozen=True, slots=True)
class _Reuse:
    """A question whose passages were in two earlier prompts, asked in three ways."""

    bench: Bench
    sheets: Mapping[str, Sheet]
    number: int
    asked: Asked
    others: Sequence[Asked]

    def add(self) -> None:
        draw = self.bench.draw(self.sheets["long"].data, self.number)
        chunks = self.bench.writer.passages(self.asked, _MOST_REUSED, draw)
        writer, name = self.bench.writer, self.sheets["long"].data
        earlier = prompts.earlier(chunks, self.others, draw)
        wrong = data.wrong_answer(self.asked, self.others)
        is_true = wrong is None or draw.random() < 0.5
        said = self.asked.answers[0] if is_true else wrong
        shelf: Shelf | None = None
        for task, limit in (("long", self.bench.answer_tokens), ("short", _SHORT), ("statement", _ONE_WORD)):
            ending = QUESTIONS[task].format(question=self.asked.text, answer=said)
            prompt = with_passages(chunks, ending)
            scenario = writer.scenario(prompt, earlier, suite=name, number=self.number)
            shelf = shelf or self.bench.server.store(scenario.stored)
            trial = self.bench.server.trial(scenario, shelf)
            if trial is None:
                self.sheets[task].skipped += 1
            else:
                self._add_task(task, trial, min(limit, self.bench.answer_tokens), is_true)

    def _add_task(self, task: str, trial: Trial, limit: int, is_true: bool) -> None:
        found = self.bench.server.answers(trial, _FIGURE_20, limit=limit, turn=self.number)
        full = found[FULL].text
        for arm, answer in found.items():
            if task == "long":
                figures = {"rouge_l": scores.rouge_l(full, answer.text)}
            elif task == "short":
                own, text = _first_line(full), _first_line(answer.text)
                figures = {
                    "jaccard": scores.best_jaccard([own], text),
                    "jaccard_reference": scores.best_jaccard(self.asked.answers, text),
                }
            else:
                figures = {
                    "accuracy": float(_verdict(answer.text) is is_true),
                    "same_as_full": float(_verdict(answer.text) is _verdict(full)),
                }
            self.sheets[task].add(arm.name, arm.budget, figures | _costs(arm, answer))


def _drawn(bench: Bench, name: str, questions: Sequence[Asked]) -> Iterator[tuple[int, Asked]]:
    """As many questions as there are rows, in a drawn order."""
    numbers = bench.draw(name).sample(range(len(questions)), min(bench.rows, len(questions)))
    return ((number, questions[number]) for number in numbers)


def _figures(measure: str, reference: str, text: str, language: str) -> dict[str, float | scores.Figures]:
    line = _first_line(text)
    if measure == "bleu":
        return {"bleu": scores.bleu_counts(reference, line, language=language)}
    return {"rouge_l": scores.rouge_l(reference, line)}


def _costs(arm: Arm, answer: Answer) -> dict[str, float]:
    approximate = {} if answer.is_approximate is None else {"approximate": float(answer.is_approximate)}
    budget = {"b": answer.b} if arm.budget else {}
    return {**budget, "computed": answer.computed, **approximate}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _verdict(text: str) -> bool | None:
    """What the first word says; None if neither."""
    words = scores.plain(text).split()
    return {"true": True, "false": False}.get(words[0]) if words else None
