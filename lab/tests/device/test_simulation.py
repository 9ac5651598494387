"""The benchmark: vLLM's scheduler and the connector on the simulated GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvshare.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM's own

ARMS = ("full", "prefix", "changed_10", "changed_1")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    from kvshare_lab.device.simulation import run

    return run(tokens="512,2048", near="0.5", requests=8, rounds=1)


def test_sharing_moves_the_bytes_of_what_is_reused(found: dict[str, Any]) -> None:
    """Up no more than the donor has, and down what was computed."""
    from kvshare_lab.device.profile import read_profile

    size = read_profile("h100").model.bytes_per_token
    for row in found["first_token"]:
        near, tokens = row["changed_10"], row["tokens"]
        assert near["decision"] == "approx"
        assert 0.1 * tokens <= near["computed"] < tokens
        assert 0.7 * tokens * size < near["work"]["bytes_up"] <= 1.01 * tokens * size
        assert near["work"]["bytes_down"] >= near["computed"] * size
        assert (near["work"]["bytes_checked"], near["stage_s"]["verify"]) == (0, 0)


def test_donors_in_blocks_are_copied_on_the_device(found: dict[str, Any]) -> None:
    """Only tables go up, and the first token comes earlier; as many tokens are computed."""
    from kvshare_lab.device.profile import read_profile
    from kvshare_lab.device.simulation import run

    size = read_profile("h100").model.bytes_per_token
    rows = run(parts="first_token", tokens="512,2048", donors="device")["first_token"]
    near, from_host = (each[1]["changed_10"] for each in (rows, found["first_token"]))
    assert near["work"]["bytes_up"] < 0.01 * from_host["work"]["bytes_up"]
    assert near["work"]["bytes_moved"] > 2 * 0.7 * 2048 * size
    assert near["computed"] == from_host["computed"]
    assert near["ttft_s"] < from_host["ttft_s"]


def test_the_same_seed_gives_the_same_times(found: dict[str, Any]) -> None:
    """Virtual time has no noise."""
    from kvshare_lab.device.simulation import run

    again = run(parts="first_token", tokens="512,2048")
    times = [
        [row[arm]["ttft_s"] for row in each["first_token"]]
        for each in (found, again)
        for arm in ("full", "changed_1")
    ]
    assert times[:2] == times[2:]


def test_every_request_of_a_load_is_answered(found: dict[str, Any]) -> None:
    """By both arms, half of them with a donor, which only the proxy can use."""
    for row in found["load"]:
        assert len(row["requests"]) == 8
        assert sum(each["is_near"] for each in row["requests"]) == 4
        assert all(len(each["gaps_s"]) == 31 for each in row["requests"])
        shares = {each.get("decision") == "approx" for each in row["requests"] if each["is_near"]}
        assert shares == {row["arm"] == "shared"}


def test_a_choice_costs_a_second_pass(found: dict[str, Any]) -> None:
    """For as many computed tokens, and no wait of the host."""
    chosen, by_place = found["choosing"]
    for ours, other in zip(chosen["first_token"], by_place["first_token"], strict=True):
        works = ours["edited"]["work"], other["edited"]["work"]
        assert [work["passes"] for work in works] == [2, 1]
        assert [work["waits"] for work in works] == [0, 0]
        assert ours["edited"]["ttft_s"] > other["edited"]["ttft_s"]


def test_ranks_know_a_step_later(found: dict[str, Any]) -> None:
    """That their copies have arrived; the copies themselves take as long."""
    from kvshare_lab.device.simulation import run

    on_two = run(parts="first_token", tokens="2048", ranks=2)["first_token"][0]["changed_10"]
    on_one = found["first_token"][1]["changed_10"]
    assert on_two["stage_s"]["write"] == pytest.approx(on_one["stage_s"]["write"], rel=0.01)
    assert 0 <= on_two["ttft_s"] - on_one["ttft_s"] < 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_hides_copies_and_waits_for_none(ranks: int) -> None:
    """A load that is alone, once like loads and passes were measured: less than both one after the other."""
    from kvshare_lab.device.simulation import run

    first, second = run(parts="first_token", tokens="4096,8192", ranks=ranks)["first_token"]
    assert "hidden" not in first["changed_10"]["stage_s"]
    near = second["changed_10"]
    copying_s, hidden_s, pass_s = (near["stage_s"][stage] for stage in ("write", "hidden", "pass"))
    assert 0.3 * copying_s < hidden_s <= copying_s
    assert near["stage_s"]["waited"] <= max(0.001, 0.02 * pass_s)
    assert near["work"]["waits"] == 0
    shortest = near["ttft_s"] - copying_s - pass_s + hidden_s
    assert 0 < shortest < first["changed_1"]["ttft_s"]


def test_streams_wait_longest_for_full_prefills(found: dict[str, Any]) -> None:
    """And not at all while nothing arrives."""
    arms = {row["arm"]: row for row in found["between_tokens"]}
    worst = {name: max(row["gaps_s"]) for name, row in arms.items()}
    assert worst["quiet"] < worst["loads"] < worst["full"]
    assert (arms["quiet"]["arrivals"], arms["loads"]["arrivals"] > 0) == (0, True)
    assert worst["quiet"] < worst["prefix_hits"] < worst["full"]
    computed = [each["work"]["passes"] for each in arms["prefix_hits"]["requests"]]
    assert (len(computed) > 0, sum(computed)) == (True, 0)


@pytest.mark.parametrize(
    "options", [{"parts": "everything"}, {"tokens": "0"}, {"tokens": "many"}, {"near": "2"}]
)
def test_what_cannot_be_simulated_is_refused(options: dict[str, Any]) -> None:
    """With the option's name and what it takes."""
    from kvshare_lab.device.simulation import run

    with pytest.raises(ConfigError, match=f"--{next(iter(options))}.*expected"):
        run(**options)


def test_both_passes_of_a_choice_are_hidden() -> None:
    """Where the first one ends before the last layers, once like loads and passes were measured."""
    from kvshare.settings import load_settings
    from kvshare_lab.device.arms import servers
    from kvshare_lab.device.parts import ALWAYS_CHOOSE, ALWAYS_SHARE
    from kvshare_lab.device.profile import read_profile
    from kvshare_lab.device.traffic import moved_and_edited

    settings = load_settings(None, {**ALWAYS_SHARE, **ALWAYS_CHOOSE})
    with servers(read_profile("h100-graphs"), settings, copies_blocks=False) as (_, shared):
        *_, last = moved_and_edited(shared, np.random.default_rng(0), [8192, 16384])
    near = last["reordered"]
    assert (near["decision"], near["work"]["passes"]) == ("approx", 2)
    assert near["stage_s"]["hidden"] > 0.5 * near["stage_s"]["pass"]
    assert near["stage_s"]["waited"] <= 0.001
