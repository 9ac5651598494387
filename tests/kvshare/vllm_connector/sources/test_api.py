"""What KVShare sends to vLLM and reads of its answers is there: options, fields, routes, metrics."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from kvshare.vllm_protocol.messages import PROMPT_KEY, RANK_HEADER
from proxy.relay.dialects import DIALECTS
from tests.kvshare.vllm_connector.sources.versions import at, sources_of
from tests.kvshare.vllm_connector.sources.vllm_sources import Sources, text_of

ROOT = Path(__file__).parents[4]
ENTRY = "vllm.entrypoints"
SALTED = "cache_salt kv_transfer_params"

# What the proxy, its client and the fake vLLM send and read: the class, and its fields.
DOCUMENTS = [
    (f"{ENTRY}.openai.chat_completion.protocol:ChatCompletionRequest", SALTED),
    (f"{ENTRY}.openai.completion.protocol:CompletionRequest", SALTED),
    (f"{ENTRY}.openai.responses.protocol:ResponsesRequest", SALTED),
    (f"{ENTRY}.anthropic.protocol:AnthropicMessagesRequest", SALTED),
    (f"{ENTRY}.serve.tokenize.protocol:TokenizeResponse", "tokens"),
    (f"{ENTRY}.scale_out.token_in_token_out.protocol:GenerateRequest", "token_ids features"),
    (f"{ENTRY}.serve.engine.protocol:PromptTokenUsageInfo", "cached_tokens"),
]

# Routes that a later version added under /v1, and their bodies' class: the proxy relays them with a salt.
ROUTES_SINCE_0_33 = {"/v1/decisions": f"{ENTRY}.openai.decisions.protocol:DecisionRequest"}


def test_every_option_that_is_passed_exists(sources: Sources) -> None:
    """Those that `kvshare vllm` adds to the command, which are fields or arguments of vLLM's."""
    from kvshare.cli import vllm_command
    from kvshare.cli.connector_options import connector_options

    options = connector_options(host="127.0.0.1", port=1, max_bytes=1)
    passed = {each for each in options if each.startswith("--")}
    passed |= {vllm_command._RENDERS, vllm_command._ONE_GROUP}
    assert len(passed) == 5
    text = text_of(sources.root, "vllm/engine") + text_of(sources.root, "vllm/entrypoints")
    for option in passed:
        field = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE), option


def test_every_field_of_the_connectors_settings_exists(sources: Sources) -> None:
    """The JSON behind `--kv-transfer-config`."""
    import json

    from kvshare.cli.connector_options import connector_options

    options = connector_options(host="127.0.0.1", port=1, max_bytes=1)
    document: dict[str, Any] = json.loads(options[options.index("--kv-transfer-config") + 1])
    fields = sources.members(at(sources, "vllm.config.kv_transfer:KVTransferConfig"))
    assert set(document) <= set(fields)
    assert '"recompute"' in ast.unparse(fields["kv_load_failure_policy"].node).replace("'", '"')


def routes(sources: Sources) -> set[str]:
    """All paths in decorators of vLLM's API, and those that are added by name."""
    found = re.findall(r"""["'](/[a-z0-9_/{}:.]*)["']""", text_of(sources.root, "vllm/entrypoints"))
    return set(found)


def test_every_route_that_is_called_exists(sources: Sources) -> None:
    client = (ROOT / "kvshare" / "fleet" / "client.py").read_text()
    checks = (ROOT / "kvshare" / "cli" / "server_checks.py").read_text()
    called = set(re.findall(r'"(/(?:v1/)?[a-z/]+)"', client + checks))
    called -= {"/info", "/segments", "/drop"}  # the connector's own, not vLLM's
    called = {path for path in called if not path.startswith("/admin")}
    called |= set(DIALECTS) | {f"{path}/render" for path in DIALECTS}
    assert called >= {"/tokenize", "/health", "/version", "/v1/models"}
    assert called - routes(sources) == set()
    text = text_of(sources.root, "vllm/entrypoints")
    assert RANK_HEADER in text


def test_a_new_route_is_decided_on() -> None:
    """The proxy relays what is under /v1, and adds a `cache_salt` to bodies: they must know it."""
    first, second = (
        {path for path in routes(sources_of(name)) if path.startswith("/v1/") and path != "/v1/"}
        for name in ("installed", "other")
    )
    assert second - first <= set(ROUTES_SINCE_0_33)
    for path in second - first:
        assert "cache_salt" in sources_of("other").members(at(sources_of("other"), ROUTES_SINCE_0_33[path]))


@pytest.mark.parametrize(("place", "fields"), DOCUMENTS)
def test_every_field_that_is_sent_or_read_exists(sources: Sources, place: str, fields: str) -> None:
    members = sources.members(at(sources, place))
    assert [name for name in fields.split() if name not in members] == []


def test_tokens_that_are_given_back_are_read_and_taken_out(sources: Sources) -> None:
    """Or vLLM would render once more, and send the list on to its engine with the ticket."""
    assert f'.pop("{PROMPT_KEY}"' in text_of(sources.root, "vllm/renderers")


def test_every_metric_that_is_read_exists(sources: Sources) -> None:
    """prometheus_client adds `_total` and `_count`."""
    text = "".join(path.read_text() for path in (ROOT / "lab" / "src" / "kvshare_lab" / "vllm").rglob("*.py"))
    named = set(re.findall(r'"(vllm:\w+)"', text))
    assert len(named) >= 3
    exported = text_of(sources.root, "vllm/v1/metrics")
    for name in named:
        bare = name.removesuffix("_count").removesuffix("_total").removesuffix("_info")
        assert any(f'"{each}' in exported for each in (name, bare)), name
