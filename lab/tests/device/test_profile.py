"""What is known of a device, and the comparison with what was measured on it."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources

import pytest
import yaml

from kvshare.errors import ConfigError
from kvshare_lab.device.profile import names, read_profile
from kvshare_lab.device.verdicts import compared, mean_error, ratios

FULL_MS = {1024: 31, 2048: 52, 4096: 104, 8192: 222, 16384: 502, 30000: 1150}


def test_every_constant_says_where_it_comes_from() -> None:
    """No value without the measurement behind it."""
    for name in names():
        assert all(read_profile(name).sources.values())


def test_an_unknown_profile_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="h100"):
        read_profile("abacus")


def test_a_profile_may_be_based_on_another_one() -> None:
    """It has that one's constants, but for its own."""
    base, own = read_profile("h100-second"), read_profile("h100-graphs")
    assert own.model == base.model
    changed = {name for name in asdict(own.costs) if getattr(own.costs, name) != getattr(base.costs, name)}
    assert changed == yaml.safe_load(_text("h100-graphs"))["costs"].keys()
    assert own.sources.keys() >= base.sources.keys() | changed


def test_a_pass_by_graphs_takes_what_a_step_of_vllm_takes() -> None:
    """Of as many tokens: stock vLLM uses the same graphs. The weights are read once."""
    costs = read_profile("h100-graphs").costs
    assert costs.graph_pass_s(8, attending_s=0.0) == costs.decode_s
    step_s = costs.step_s([(0, 512)], bytes_per_token=0)
    assert costs.graph_pass_s(512, attending_s=costs.attention_s(0, 512)) == pytest.approx(step_s)


@pytest.mark.parametrize(("num_tokens", "measured"), FULL_MS.items())
def test_a_full_prefill_takes_what_was_measured(num_tokens: int, measured: float) -> None:
    """Within 4 %: the formula's fit, in steps of 8,192 tokens."""
    profile = read_profile("h100")
    ends = [*range(profile.model.step_tokens, num_tokens, profile.model.step_tokens), num_tokens]
    steps = zip([0, *ends], ends, strict=False)
    size = profile.model.bytes_per_token
    seconds = sum(profile.costs.step_s([part], bytes_per_token=size) for part in steps)
    assert 1e3 * (profile.costs.front_s + seconds) == pytest.approx(measured, rel=0.04)


def test_a_document_is_compared_figure_by_figure() -> None:
    """What it lacks is left out; what is off by more than a quarter is missed."""

    def arm(seconds: float) -> dict[str, object]:
        return {"ttft_s": seconds, "stage_s": {"verify": 0.0117, "write": 0.01}}

    row = {"tokens": 1024, "full": arm(0.031), "prefix": arm(0.01), "changed_10": arm(0.029)}
    document = {"first_token": [{**row, "changed_1": arm(0.0155)}]}
    figures = {figure.name: figure for figure in compared(document, "h100")}
    assert figures.keys() == {"1024 full", "1024 changed_10", "1024 verify", "1024 write"}
    missed = {name for name, figure in figures.items() if figure.is_missed}
    assert missed == {"1024 changed_10", "1024 write"}
    assert mean_error(figures.values()) == pytest.approx(0.25)
    assert ratios(document)["first_token 1024 changed_1"] == pytest.approx(2)


def _text(name: str) -> str:
    return (resources.files("kvshare_lab.device") / "profiles" / f"{name}.yaml").read_text("utf-8")
