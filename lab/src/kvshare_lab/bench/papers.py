"""
`kvshare bench papers`: tables of KVShare's, CacheBlend's and Cache-Craft's papers, with any model.

    kvshare-1       WMT19 (BLEU), SAMSum (ROUGE-L): full, prefix, response, kvshare
    cacheblend-12   2WikiMQA, MuSiQue (F1), SAMSum (ROUGE-L) and time to first token, passages cached apart
    cachecraft-20   ROUGE-L compared with the full prefill's answer, by budget
    cachecraft-21   Jaccard similarity of short answers, accuracy on statements that are true or false

A data set that is missing is left out, and named in `absent`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshare.errors import ConfigError
from kvshare.served_model import DEFAULT, find_model
from kvshare.settings import load_settings
from kvshare_lab.bench.harness import chosen, environment
from kvshare_lab.fidelity.laboratory import Laboratory
from kvshare_lab.fidelity.papers import tables as papers
from kvshare_lab.fidelity.papers.answers import Answerer
from kvshare_lab.fidelity.papers.prompts import EXAMPLES, TEXTS, Writer
from kvshare_lab.fidelity.papers.tables import Bench

TABLES = ("kvshare-1", "cacheblend-12", "cachecraft-20", "cachecraft-21")
_SMALL = 1e9  # parameters
_SHORTEST = 200  # tokens of a prompt that has passages


def run(
    *,
    model: str = DEFAULT,
    data: Path | None = None,
    samsum: Path | None = None,
    tables: str = ",".join(TABLES),
    rows: int = 20,
    prompt_tokens: int = 1500,
    answer_tokens: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Tables of `rows` prompts of each data set, cut to `prompt_tokens`. Raises ConfigError, ModelError."""
    names = sorted(set(chosen(tables, TABLES, "--tables")), key=TABLES.index)
    if data is None or not data.is_dir():
        raise ConfigError("--data", f"expected a folder with wmt19, rag_cacheblend, ...; got {data}")
    if prompt_tokens < _SHORTEST:
        raise ConfigError("--prompt-tokens", f"must be at least {_SHORTEST}, got {prompt_tokens}")
    served = find_model(model, download=True)
    laboratory = Laboratory.open(served, load_settings(), data=data, noise=False)
    longest = min(prompt_tokens, laboratory.model.model.max_model_len - answer_tokens)
    bench = Bench(
        answerer=Answerer(laboratory.model, laboratory.encoder, laboratory.settings),
        writer=Writer(laboratory.encoder, longest),
        data=data,
        samsum=samsum,
        rows=rows,
        answer_tokens=answer_tokens,
        seed=seed,
    )
    found = {}
    if "kvshare-1" in names:
        found["kvshare-1"] = papers.kvshare_1(bench)
    if "cacheblend-12" in names:
        found["cacheblend-12"] = papers.cacheblend_12(bench)
    if {"cachecraft-20", "cachecraft-21"} & set(names):
        found["cachecraft-20"], found["cachecraft-21"] = papers.cachecraft(bench)
    return {
        "model": served.name,
        "data": data.name,
        "samsum": None if samsum is None else samsum.name,
        "tables": {name: found[name] for name in names},
        "absent": bench.absent,
        **_notes(bench, served.name, names),
        "environment": environment(),
    }


def _notes(bench: Bench, name: str, names: Sequence[str]) -> dict[str, Any]:
    """What a reader must know beside the figures."""
    texts = TEXTS["report"]
    parameters = sum(each.numel() for each in bench.answerer.model.model.network.parameters())
    note = texts["small_model"].format(model=name, parameters=parameters / 1e6)
    return {
        "parameters": parameters,
        "note": note.strip() if parameters < _SMALL else None,
        "setups": {each: texts["setups"][each].format(examples=EXAMPLES).strip() for each in names},
        "kvshare": texts["kvshare"].strip(),
        "costs": texts["costs"].strip(),
        "length": texts["length"].format(tokens=bench.answer_tokens).strip(),
    }
