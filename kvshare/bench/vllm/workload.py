"""A file of `kvshare workload`, or any log that replay reads, as the prompts of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from delta_tree import TokenIds, token_ids
from kvshare.bench.random_models import DEMO_VOCAB_SIZE
from kvshare.errors import LogError
from kvshare.replay.readers import ReadReport, read_file
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.tokens import RequestTokenizer
from kvshare.served_model import DEMO


@dataclass(frozen=True, slots=True, eq=False)
class FilePrompts:
    """The first prompts of a file, in its order, in the tokens of the benchmarks' models."""

    prompts: Sequence[TokenIds]
    description: dict[str, Any]  # for the benchmark's document


def read_prompts(path: Path, *, num_prompts: int, max_tokens: int) -> FilePrompts:
    """
    The first `num_prompts` of a file, each cut to its first `max_tokens` tokens.

    Raises:  LogError where the file has fewer, or a prompt that the benchmarks' models cannot take
    """
    report = ReadReport()
    logged = chain.from_iterable(read_file(path, report))
    requests = RequestTokenizer.load(DEMO).tokenize(islice(logged, num_prompts))
    whole = [_checked(request) for request in requests]
    if len(whole) < num_prompts:
        bad = f", and {report.num_unreadable} lines that cannot be read" if report.num_unreadable else ""
        raise LogError(f"{path.name} has {len(whole)} prompts{bad}; {num_prompts} are needed")
    prompts = [token_ids(prompt[:max_tokens]) for prompt in whole]
    description = {
        "file": path.name,  # without its folder
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, prompts)),
        "num_cut": sum(len(prompt) > max_tokens for prompt in whole),
        "unreadable": report.unreadable().model_dump(mode="json"),
    }
    return FilePrompts(prompts, description)


def _checked(request: TokenizedRequest) -> TokenIds:
    place = f"{request.logged.source}, line {request.logged.line}"
    if not request.num_tokens:
        raise LogError(f"{place}: the prompt has no tokens, expected one or more")
    if (highest := int(request.token_ids.max())) >= DEMO_VOCAB_SIZE:
        raise LogError(
            f"{place}: token {highest}, expected one below {DEMO_VOCAB_SIZE} of the benchmarks' models"
        )
    return request.token_ids
