"""`kvshare vllm --shared-tier`: what the connector gets, and what is refused before vLLM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvshare.cli.commands_of_vllm import extra
from tests.kvshare.cli.installation import Installation


def test_a_shared_store_is_given_to_the_connector(installed: Installation) -> None:
    """With the defaults of the section shared_tier. Secrets are in files or the environment."""
    own = extra(installed.printed("some/model", "--shared-tier", "redis://localhost:6379/3"))["shared_tier"]
    assert isinstance(own, dict)
    assert (own["url"], own["keep_s"], own["password_file"]) == ("redis://localhost:6379/3", 86400, None)
    said = '{"url": "rediss://store.example", "ca_file": "ca.pem", "timeout_s": 0.5}'
    own = extra(installed.printed("some/model", "--disk", "/kv", "--shared-tier", said))["shared_tier"]
    assert isinstance(own, dict)
    assert (own["url"], own["timeout_s"]) == ("rediss://store.example", 0.5)
    assert Path(str(own["ca_file"])).is_absolute()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("localhost", "expected redis://HOST:PORT/NUMBER"),
        ("{", "or JSON with settings of shared_tier"),
        ("redis://:secret@localhost", "expected no user name or password"),
        ("redis://store.example", "prompts would cross the network as they are"),
        ('{"url": "redis://localhost", "max_bytes": 5}', "expected at least --kv-bytes"),
        ('{"url": "redis://localhost", "colour": 5}', "colour"),
    ],
)
def test_a_store_that_cannot_be_is_refused(installed: Installation, said: str, problem: str) -> None:
    """Before vLLM starts, and no secret is repeated."""
    outcome = installed.run("some/model", "--shared-tier", said)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert problem in " ".join(outcome.stderr.replace("│", " ").split())
    assert "secret" not in outcome.stderr
