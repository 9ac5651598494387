"""`kvshare bench inway` on the simulated GPU: its machines, its two arms, and what it calls missed."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare_lab.device.machines import MACHINES, machine
from kvshare_lab.device.profile import read_profile

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM's own


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    from kvshare_lab.device.inway import run

    return run(
        machines="as_it_is", parts="cells,first", tokens="256,8192", shares="0.9", repeats=1, requests=5
    )


def cell(found: dict[str, Any], load: str, kind: str, tokens: int | None) -> dict[str, Any]:
    rows = found["cells"]["cells"]
    names = {"of": load, "kind": kind, "tokens": tokens, "token": "first"}
    return next(row for row in rows if all(row[name] == value for name, value in names.items()))


def test_both_arms_get_the_same_requests(found: dict[str, Any]) -> None:
    """A pair of each kind; a near-duplicate takes a part of the time."""
    near = cell(found, "alone", "shared", 8192)
    assert (near["requests"], near["decisions"], near["missed"]) == (1, {"approx": 1}, [])
    assert near["on_ms"]["p50"] < 0.6 * near["off_ms"]["p50"]
    assert cell(found, "load", "refused", 256)["requests"] == 5
    assert cell(found, "mix 90%", "shared", None)["requests"] == 9
    assert cell(found, "mix 90%", "all", None)["requests"] == 10


def test_the_first_requests_are_as_fast_as_in_full(found: dict[str, Any]) -> None:
    """Near-duplicates of 4,096 tokens are even on rates that nobody has measured."""
    assert min(found["first"]["full_over_served"][1:]) > 0.97


def test_a_lookup_that_takes_long_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the verdict can fail: a prompt like no other waits for what is found, which is nothing."""
    from dataclasses import replace

    from kvshare_lab.device.in_way_parts import measured
    from kvshare_lab.device.two_arms import InWay

    profile = read_profile("h100")
    slow = replace(profile, costs=replace(profile.costs, find_s=0.1))
    options = InWay(lengths=[8192], shares=[], repeats=1, requests=3)
    cells = measured(slow, ["cells"], machines=["as_it_is"], options=options, seed=0)["cells"]
    assert not cells["passed"]
    assert any(line.startswith("as_it_is alone 8192 unshared") for line in cells["missed"])


def test_mode_off_takes_as_long_as_stock_vllm() -> None:
    """So stock vLLM stands for it: a connector without a ticket does nothing."""
    import numpy as np

    from kvshare.requests import SharingMode
    from kvshare.settings import load_settings
    from kvshare_lab.device.arms import servers
    from kvshare_lab.vllm.prompts import unrelated_prompt

    prompt = unrelated_prompt(np.random.default_rng(0), 2000)
    with servers(read_profile("h100"), load_settings(None)) as (plain, shared):
        off = shared.send(prompt, max_tokens=4, at=1.0, mode=SharingMode.OFF)
        stock = plain.send(prompt, max_tokens=4, at=1.0)
        for server in (plain, shared):
            server.run()
    assert off.token_at == pytest.approx(stock.token_at, abs=1e-4)


def test_the_server_measures_its_costs_at_start_and_is_controlled() -> None:
    """As the product is started; its own requests leave nothing, and some blocks are served unshared."""
    import numpy as np

    from kvshare.settings import load_settings
    from kvshare_lab.device.arms import servers
    from kvshare_lab.device.start import measure_at_start
    from kvshare_lab.device.traffic import alone
    from kvshare_lab.vllm.prompts import unrelated_prompt

    rng, profile = np.random.default_rng(0), read_profile("h100")
    settings = load_settings(None, {"control.first_requests": 0, "control.unshared_share": 0.5})
    with servers(profile, settings) as (plain, shared):
        measure_at_start(shared, rng)
        assert {"prefill", "pass", "load"} <= shared.cost.measured
        took_s = alone(plain, unrelated_prompt(rng, 2048)).answer.ttft_s
        assert shared.cost.rates.full_s(2048) == pytest.approx(took_s, rel=0.1)
        assert shared.info().num_segments == 0
        sent = [alone(shared, unrelated_prompt(rng, 64)).answer.request_id for _ in range(100)]
    num_unshared = [shared.decision(request_id) for request_id in sent].count("full: experiment")
    assert 0 < num_unshared < 100
    counted = shared.admission.status().num_requests
    assert counted["unshared"] == num_unshared
    assert sum(counted.values()) == 100


def test_a_prefill_that_another_request_joins_was_not_alone() -> None:
    """So neither teaches what a prefill takes; both teach how long prompts wait beside others."""
    import numpy as np

    from kvshare.settings import load_settings
    from kvshare_lab.device.arms import servers
    from kvshare_lab.vllm.prompts import unrelated_prompt

    rng = np.random.default_rng(0)
    with servers(read_profile("h100"), load_settings(None)) as (_, shared):
        for _ in range(2):
            shared.send(unrelated_prompt(rng, 4096), max_tokens=1, at=1.0)
        shared.run()
        shared.read_events()
    assert "prefill" not in shared.cost.measured


def test_the_proxy_evicts_before_the_connector_must() -> None:
    """A prompt that is pinned stays, however many follow it."""
    import numpy as np

    from kvshare.settings import load_settings
    from kvshare_lab.device.arms import servers
    from kvshare_lab.device.traffic import alone
    from kvshare_lab.vllm.bounds import prompt_of_kind
    from kvshare_lab.vllm.prompts import unrelated_prompt

    rng = np.random.default_rng(0)
    donor = unrelated_prompt(rng, 4096)
    full = machine(read_profile("h100"), "full_store", longest=32768)
    with servers(full, load_settings(None)) as (_, shared):
        alone(shared, donor)
        shared.pin(donor)
        for _ in range(20):
            alone(shared, unrelated_prompt(rng, 4096))
        near = alone(shared, prompt_of_kind(rng, "shared", donor), donor)
    assert shared.decision(near.answer.request_id) == "approx"


@pytest.mark.parametrize("name", MACHINES)
def test_a_derived_machine_takes_the_longest_prompts(name: str) -> None:
    """Each is worse in one thing than the one that was measured, which stays as it is."""
    measured = read_profile("h100")
    derived = machine(measured, name, longest=32768)
    assert derived.model.max_model_len > 32768
    is_same = (derived.costs, derived.model.kv_bytes) == (measured.costs, measured.model.kv_bytes)
    assert is_same == (name == "as_it_is")


@pytest.mark.parametrize(
    "options", [{"machines": "abacus"}, {"parts": "all"}, {"tokens": "1"}, {"shares": "2"}]
)
def test_what_cannot_be_simulated_is_refused(options: dict[str, Any]) -> None:
    """With the option's name and what it takes."""
    from kvshare.errors import ConfigError
    from kvshare_lab.device.inway import run

    with pytest.raises(ConfigError, match=f"--{next(iter(options))}.*expected"):
        run(**options)
