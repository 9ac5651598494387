"""`kvshare explain` on a stopped store, and the requests it refuses before it asks anybody."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from delta_tree import DonorReason
from kvshare.cli.explain_offline import explain_offline
from kvshare.conversation.chat import Chat
from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.engine import GenerationRequest, SamplingParams
from kvshare.requests import SharingMode
from kvshare.settings import Settings, load_settings
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.family import Family

CHEAP, DEAR = 0.0, 0.55  # seconds that a plan must save
QUESTION = "The delegation asks at {0} o'clock how many of the {1} chairs in the hall are free. " * 6
FACTS = "Please note that the museum in Oslo opens at nine, and that on Sundays nobody pays to see it. " * 12


def chat(*parts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "".join(parts)}]


STORED = (chat(QUESTION.format(9, 80), FACTS), chat(FACTS, QUESTION.format(10, 70)), chat("Hello. " * 40))
ASKED = (
    STORED[0],
    chat(QUESTION.format(9, 80), FACTS, "And on Mondays?"),
    chat(QUESTION.format(11, 80), FACTS),
    chat("First of all: ", FACTS, QUESTION.format(10, 70)),
    chat("Nothing that anybody has asked before. " * 10),
)


async def explained_by_a_server(settings: Settings) -> list[dict[str, Any]]:
    """What a server says of the questions once it has answered the stored ones; it is stopped then."""
    engine = EmbeddedEngine(settings)
    await engine.start()
    mode = SharingMode(settings.sharing.mode)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)

    async def request(messages: Sequence[Mapping[str, Any]]) -> GenerationRequest:
        namespace = engine.namespace(tenant="t", scope="tenant")
        return GenerationRequest(
            "r", namespace, await engine.encode_chat(Chat(tuple(messages))), sampling, mode
        )

    for messages in STORED:
        await engine.generate(await request(messages), lambda _: None)
        await engine.settle()
    documents = [await engine.explain(await request(messages)) for messages in ASKED]
    await engine.stop()
    return documents


@pytest.fixture
def dynamic_model(tmp_path: Path) -> Path:
    """A model whose keys cannot be moved, with the forms model's tokenizer."""
    folder = tmp_path / "dynamic"
    shutil.copytree(MODEL_PATH, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(MODEL_PATH)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
@pytest.mark.parametrize(
    ("model", "mode", "min_saved_s", "reasons"),
    [
        ("demo", "approx", CHEAP, {None, "no_candidates"}),
        ("demo", "approx", DEAR, {None, "does_not_pay"}),
        ("demo", "exact", CHEAP, {None, "exact_only", "no_candidates"}),
        ("dynamic", "approx", CHEAP, {None, "rotation_unknown", "no_candidates"}),
    ],
)
def test_a_stopped_store_explains_what_its_server_would_have(
    tmp_path: Path,
    store: Path,
    dynamic_model: Path,
    model: str,
    mode: str,
    min_saved_s: float,
    reasons: set[str | None],
) -> None:
    """The same decision, counts, spans and donors, whatever the limits and the model; nothing is written."""
    settings = load_settings(
        overrides={
            "store.path": str(store),
            "model.path": str(dynamic_model) if model == "dynamic" else model,
            "model.dtype": "float32",
            "sharing.mode": mode,
            "sharing.max_risk": 1.0,
            "cost.min_saved_s": min_saved_s,
            "cost.learn": False,
            "index.dense": False,
            "index.search_timeout_s": 60.0,
        }
    )
    expected = asyncio.run(explained_by_a_server(settings))
    before = {path: path.read_bytes() for path in store.glob("tree.sqlite3*")}
    found = [explain_offline(store, settings, messages) for messages in ASKED]
    for here, there in zip(found, expected, strict=True):
        assert without_times(here) == {
            **without_times(there),
            "planned_for": {"tenant": "t", "key": None},
            "rules": [],
        }
    assert {document["reason"] for document in found} == reasons
    assert {path: path.read_bytes() for path in store.glob("tree.sqlite3*")} == before


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    """What is decided. Estimates are as measured, and so are the stages."""
    return {name: value for name, value in document.items() if name not in ("estimate", "stage_ms")}


@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
def test_a_stopped_store_explains_prompts_behind_the_rules(store: Path, family: Family) -> None:
    """As the server would have tokenized them."""
    rule = {"name": "nonce", "match": "cch=[0-9a-f]+", "action": "pin", "value": "cch=0"}
    plain = {"store.path": str(store), "model.path": "demo", "index.dense": False}
    plain["index.search_timeout_s"] = 60.0
    text = "cch={}; " + "What is due, and when? " * 10
    expected = explain_offline(store, load_settings(overrides=plain), chat(text.format("0")))
    ruled = load_settings(overrides={**plain, "rules": [rule]})
    found = explain_offline(store, ruled, chat(text.format("9a8b7c6d")))
    assert (expected["rules"], found["rules"]) == ([], ["nonce"])
    assert without_times(found) == {**without_times(expected), "rules": ["nonce"]}


def test_every_outcome_of_a_candidate_is_explained() -> None:
    """docs/cli.md has a row for each word; two of them come from `explain_lookup`, not from a composition."""
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    explained = set(
        re.findall(r"^\| `(\w+)` \|", page.partition("| outcome |")[2].partition("\n\n")[0], re.M)
    )
    assert explained == {*DonorReason, "left_out", "gone"}


@pytest.mark.slow
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
def test_a_prompt_that_nobody_shares_is_computed_in_full(cli: Cli, store: Path, family: Family) -> None:
    """The plan on a stopped store says what it would compute and why it shares nothing."""
    prompt = "A question that has nothing in common with what is stored. " * 5
    outcome = cli("explain", "--prompt", prompt, "--store", store, "--format", "json")
    assert outcome.code == 0
    document = outcome.document
    assert (document["decision"], document["recomputed"]) == ("full", document["num_tokens"])
    assert document["reason"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--prompt", "x", "--file", "y"), ("--file", "missing.json"), ("--file", "-")],
)
def test_explain_wants_one_request(cli: Cli, arguments: tuple[str, ...]) -> None:
    """Neither or both of --prompt and --file, or a file without messages, is wrong usage."""
    outcome = cli("explain", *arguments, stdin='{"prompt": "hello"}')
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "Traceback" not in outcome.stderr
