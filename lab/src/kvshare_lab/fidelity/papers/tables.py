"""One function for each paper: rows of its table, for the data sets that are there and its arms."""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvshare.extras import require
from kvshare_lab.fidelity import measures
from kvshare_lab.fidelity.papers import prompts
from kvshare_lab.fidelity.papers.answers import FULL, Answer, Answerer, Arm, Sheet
from kvshare_lab.fidelity.papers.prompts import EXAMPLES, QUESTIONS, REQUESTS, TEXTS, Asked, Pair, Writer
from kvshare_lab.fidelity.scenario import Messages, tokenized_prompt
from kvshare_lab.fidelity.stored_prompts import StoredPrompts
from vector_index import Embedder

log = logging.getLogger(__name__)

_DIRECTIONS = ("de-en", "en-de", "zh-en", "en-zh")
_MOST_ALONE, _MOST_REUSED = 10, 5  # passages of a prompt: top-k of CacheBlend and of Cache-Craft
_NUM_STORED = 2  # earlier prompts from which a new one may copy
_LIMITS: Mapping[str | None, int] = {"short": 12, "statement": 4}  # tokens of an answer, by task
_TOKENS_PER_WORD = 1.4
_PIECES = 8  # of _LONGEST_PIECE tokens fit into the longest prompt
_LONGEST_PIECE = 512
_ARMS = {table: tuple(Arm(**arm) for arm in arms) for table, arms in TEXTS["arms"].items()}

Rows = list[dict[str, Any]]
Score = Callable[[str, str], float | measures.Figures]  # of a reference and an answer


@dataclass(frozen=True, slots=True)
class Bench:
    """What all tables are made with. `samsum`: the user's own copy of SAMSum."""

    answerer: Answerer
    writer: Writer
    data: Path
    samsum: Path | None
    rows: int
    answer_tokens: int
    seed: int
    absent: list[str] = field(default_factory=list)  # data sets that are not there

    def draw(self, name: str, number: int = 0) -> random.Random:
        """A generator that depends on the seed, the name and the number only."""
        return random.Random(f"{self.seed}:{name}:{number}")

    def drawn(self, name: str, numbers: range) -> list[int]:
        """As many of these numbers as a table has rows, in a drawn order."""
        return self.draw(name).sample(numbers, min(self.rows, len(numbers)))

    def is_there(self, name: str, items: Sequence[object]) -> bool:
        """Whether a data set has items; if not, its name is added to `absent`."""
        if not items and name not in self.absent:
            self.absent.append(name)
        return bool(items)

    def summaries(self) -> list[Pair]:
        pairs = prompts.samsum(self.samsum) if self.samsum else []
        return pairs if self.is_there("SAMSum", pairs) else []

    def store(self, chats: Sequence[Messages]) -> StoredPrompts:
        return self.answerer.store([tokenized_prompt(chat, self.writer.encoder) for chat in chats])

    def answers(
        self, table: str, sheet: Sheet, number: int, prompt: Messages, stored: StoredPrompts
    ) -> dict[Arm, Answer]:
        """The answers of a table's arms; none where no copy is approximate, which the sheet counts."""
        scenario = self.writer.scenario(prompt, [], suite=sheet.data, number=number)
        trial = self.answerer.trial(scenario, stored)
        if trial is None:
            sheet.skipped += 1
            return {}
        limit = min(self.answer_tokens, _LIMITS.get(sheet.task, self.answer_tokens))
        found = self.answerer.answers(trial, _ARMS[table], limit=limit, turn=number)
        log.info("%s: prompt %d answered", sheet.data, number)
        return found


def kvshare_1(bench: Bench) -> Rows:
    """KVShare, table 1: translation and summaries, compared with returning an earlier answer."""
    found = []
    for languages in _DIRECTIONS:
        name, pairs = f"WMT19 {languages}", prompts.wmt19(bench.data, languages)
        if bench.is_there(name, pairs):
            score = partial(measures.bleu_counts, language=languages.rpartition("-")[2])
            found += _stream(bench, name, pairs, REQUESTS[languages], "bleu", score)
    if pairs := bench.summaries():
        found += _stream(bench, "SAMSum", pairs, REQUESTS["summary"], "rouge_l", measures.rouge_l)
    return found


class _Earlier(NamedTuple):
    """A prompt of a stream, the embedding of its text, and the full prefill's answer."""

    prompt: Messages
    vector: NDArray[np.float32]
    answer: str


def _stream(bench: Bench, name: str, pairs: Sequence[Pair], request: str, measure: str, score: Score) -> Rows:
    """
    Asks for pairs one after another, with the pairs before as examples.

    The two earlier prompts with the most similar text are stored; the first two have none to copy from.
    """
    require("replay", what="this suite, which looks for similar texts,")
    sheet, wanted, embedder = Sheet(name), bench.rows + _NUM_STORED, Embedder()
    start = bench.draw(name).randint(EXAMPLES, max(EXAMPLES, len(pairs) - wanted))
    earlier: list[_Earlier] = []
    for number in range(start, min(start + wanted, len(pairs))):
        _, prompt = bench.writer.few_shot(pairs, number, request)
        vector = embedder.embed(["\n".join(message["content"] for message in prompt)])[0]
        near = sorted(earlier, key=lambda each: -float(each.vector @ vector))[:_NUM_STORED]
        found: dict[Arm, Answer] = {}
        if len(near) == _NUM_STORED:
            stored = bench.store([each.prompt for each in reversed(near)])  # the nearest is the newest
            found = bench.answers("kvshare-1", sheet, number, prompt, stored)
        if found:
            full = found[FULL].text
            found[Arm("response")] = Answer(near[0].answer, 0.0, 0.0, 0.0)
        else:
            alone = tokenized_prompt(prompt, bench.writer.encoder)
            full = bench.answerer.full_answer(alone, bench.answer_tokens)
        earlier.append(_Earlier(prompt, vector, full))
        for arm, answer in found.items():
            figures = {measure: score(pairs[number].result, _first_line(answer.text))}
            sheet.add(arm.name, 0.0, figures | _costs(arm, answer))
    return sheet.rows(compared=(measure,), seed=bench.seed)


def cacheblend_12(bench: Bench) -> Rows:
    """CacheBlend, figure 12: quality and time to first token, with every passage cached alone."""
    found = []
    words = int(min(_LONGEST_PIECE, bench.writer.longest / _PIECES) / _TOKENS_PER_WORD)
    for name, file in (("2WikiMQA", "wikimqa_s_clean"), ("MuSiQue", "musique_s")):
        questions = prompts.cacheblend(bench.data, file, piece_words=words)
        if bench.is_there(f"{name} (CacheBlend)", questions):
            sheet = Sheet(name)
            for number in bench.drawn(file, range(len(questions))):
                asked = questions[number]
                chunks = bench.writer.passages(asked, _MOST_ALONE, bench.draw(name, number))
                prompt = prompts.with_passages(chunks, QUESTIONS["short"].format(question=asked.text))
                alone = [prompts.with_passages((), chunk) for chunk in chunks]
                for arm, answer, costs in _timed(bench, sheet, number, prompt, alone):
                    f1 = measures.best(measures.token_f1, asked.answers, _first_line(answer.text))
                    sheet.add(arm.name, arm.budget, {"f1": f1} | costs)
            found += sheet.rows(compared=("f1",), seed=bench.seed)
    if pairs := bench.summaries():
        sheet = Sheet("SAMSum")
        for number in bench.drawn("SAMSum 12", range(EXAMPLES, len(pairs))):
            examples, prompt = bench.writer.few_shot(pairs, number, REQUESTS["summary"])
            for arm, answer, costs in _timed(bench, sheet, number, prompt, examples):
                rouge_l = measures.rouge_l(pairs[number].result, _first_line(answer.text))
                sheet.add(arm.name, arm.budget, {"rouge_l": rouge_l} | costs)
        found += sheet.rows(compared=("rouge_l",), seed=bench.seed)
    return found


def _timed(
    bench: Bench, sheet: Sheet, number: int, prompt: Messages, stored: Sequence[Messages]
) -> Iterator[tuple[Arm, Answer, dict[str, float]]]:
    """Every arm's answer, and its costs with the time to the first token."""
    found = bench.answers("cacheblend-12", sheet, number, prompt, bench.store(stored))
    for arm, answer in found.items():
        seconds = {"ttft_s": answer.seconds, "ttft_of_full": answer.seconds / found[FULL].seconds}
        yield arm, answer, _costs(arm, answer) | seconds


def cachecraft(bench: Bench) -> tuple[Rows, Rows]:
    """Cache-Craft, figures 20 and 21: similarity to the full prefill's answer, by budget."""
    long, short = [], []
    for name, read, file in (
        ("MuSiQue", prompts.marked, "musique"),
        ("MuSiQue, single hop", prompts.single_hop, "musique"),
        ("2WikiMQA", prompts.marked, "2wikimqa"),
    ):
        questions = read(bench.data, file)
        if not bench.is_there(name, questions):
            continue
        sheets = {task: Sheet(name, task) for task in ("long", "short", "statement")}
        for number in bench.drawn(name, range(len(questions))):
            asked = questions[number]
            different = [other for other in questions if other is not asked]
            others = bench.draw(f"{name} others", number).sample(different, _NUM_STORED)
            _add_reuse(bench, sheets, number, asked, others)
        long += sheets["long"].rows(seed=bench.seed)
        short += sheets["short"].rows(compared=("jaccard_reference",), seed=bench.seed)
        short += sheets["statement"].rows(compared=("accuracy",), seed=bench.seed)
    return long, short


def _add_reuse(
    bench: Bench, sheets: Mapping[str, Sheet], number: int, asked: Asked, others: Sequence[Asked]
) -> None:
    """A question whose passages were in two earlier prompts, asked in three ways."""
    draw = bench.draw(sheets["long"].data, number)
    chunks = bench.writer.passages(asked, _MOST_REUSED, draw)
    stored = bench.store(prompts.earlier(chunks, others, draw))
    wrong = prompts.wrong_answer(asked, others)
    is_true = wrong is None or draw.random() < 0.5
    for task, sheet in sheets.items():
        ending = QUESTIONS[task].format(question=asked.text, answer=asked.answers[0] if is_true else wrong)
        prompt = prompts.with_passages(chunks, ending)
        found = bench.answers("cachecraft", sheet, number, prompt, stored)
        for arm, answer in found.items():
            figures = _likeness(task, asked, answer.text, found[FULL].text, is_true=is_true)
            sheet.add(arm.name, arm.budget, figures | _costs(arm, answer))


def _likeness(task: str, asked: Asked, text: str, full: str, *, is_true: bool) -> dict[str, float]:
    """The figures of an answer to one of the three tasks, against the full prefill's and the right one."""
    if task == "long":
        return {"rouge_l": measures.rouge_l(full, text)}
    if task == "short":
        line = _first_line(text)
        return {
            "jaccard": measures.best(measures.jaccard, [_first_line(full)], line),
            "jaccard_reference": measures.best(measures.jaccard, asked.answers, line),
        }
    verdict = _verdict(text)
    return {"accuracy": float(verdict is is_true), "same_as_full": float(verdict is _verdict(full))}


def _costs(arm: Arm, answer: Answer) -> dict[str, float]:
    approximate = {} if answer.is_approximate is None else {"approximate": float(answer.is_approximate)}
    budget = {"b": answer.b} if arm.budget else {}
    return {**budget, "computed": answer.computed, **approximate}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _verdict(text: str) -> bool | None:
    """True or false by the first word; None for any other word."""
    words = measures.plain(text).split()
    return {"true": True, "false": False}.get(words[0]) if words else None
