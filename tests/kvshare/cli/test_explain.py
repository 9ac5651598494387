"""`kvshare explain` on a stopped store, and the requests it refuses before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.family import Family


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
