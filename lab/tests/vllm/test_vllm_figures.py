"""The arithmetic of the vLLM benchmarks' keys, on times that are written by hand."""

import os
import time

import numpy as np
import pytest

from kvshare.errors import ConfigError
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.bench.bound import Bound
from kvshare_lab.bench.figures import interval, intervals, trend
from kvshare_lab.bench.harness import rounds
from kvshare_lab.vllm import interference, load, ttft
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.cpu_time import session_cpu_seconds
from kvshare_lab.vllm.interference import Scene
from kvshare_lab.vllm.prompts import near_duplicate, prefix_hit, unrelated_prompt
from kvshare_lab.vllm.sequences import (
    Load,
    Request,
    closed_figures,
    open_figures,
    play_open,
    poisson_arrivals,
)
from kvshare_lab.vllm.steady import course
from kvshare_lab.vllm.ttft import Repeat


def test_an_interval_is_students() -> None:
    """1, 2, 3 have a standard error of 1 / sqrt(3), and t is 4.303 for two degrees of freedom."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx({"low": 2 - 2.4841, "high": 2 + 2.4841}, abs=1e-3)
    assert interval([1.0]) is None
    assert intervals({"a": [5.0, 5.0]}) == {"a": {"low": 5.0, "high": 5.0}}


def test_a_trend_is_the_relative_change_of_each_step() -> None:
    """Exactly 2 % less every time; with noise around it the interval holds it."""
    falling = [3 * 0.98**number for number in range(12)]
    slope, around = trend(falling)
    assert slope == pytest.approx(-0.02)
    assert around == pytest.approx({"low": -0.02, "high": -0.02})
    noisy = [value * (1.01 if number % 2 else 0.99) for number, value in enumerate(falling)]
    _, around = trend(noisy)
    assert around is not None
    assert around["low"] < -0.02 < around["high"] < 0
    assert trend([1.0, 1.1])[1] is None


def test_the_course_of_a_steady_store() -> None:
    """Means of three batches at either end."""
    found = course([2.0, 4.0, 6.0, 9.0, 3.0, 3.0, 3.0])
    assert found["last3_over_first3"] == pytest.approx(3 / 4)
    assert found["last_over_first"] == pytest.approx(1.5)
    assert found["intervals"]["trend_per_batch"]["low"] < found["trend_per_batch"]


def test_arms_take_turns_in_coming_first() -> None:
    """After a round that does not count, unless there is none."""
    assert list(rounds("ab", 2)) == [(False, ["b", "a"]), (True, ["a", "b"]), (True, ["b", "a"])]
    assert list(rounds("ab", 1, warms_up=False)) == [(True, ["a", "b"])]


def test_even_edits_leave_the_top_alone() -> None:
    """Five stretches, each inside its fifth of the prompt and away from its ends."""
    rng = np.random.default_rng(0)
    donor = unrelated_prompt(rng, 2000)
    edited = near_duplicate(rng, donor, changed=0.1, edits=5, is_even=True)
    places = np.nonzero(donor != edited)[0]
    assert 180 < len(places) <= 200
    for part in range(5):
        own = places[(places >= 400 * part) & (places < 400 * part + 400)] - 400 * part
        assert 100 < own[0] < own[-1] < 300


def test_a_prefix_hit_leaves_as_many_tokens_to_compute() -> None:
    """The donor's head ends at a block."""
    rng = np.random.default_rng(0)
    donor = unrelated_prompt(rng, 1000)
    prompt = prefix_hit(rng, donor, num_new=130, block_size=128)
    same = int(np.argmax(prompt[: len(donor)] != donor[: len(prompt)]))
    assert (same, len(prompt)) == (896, 1026)


def test_cpu_seconds_are_those_of_a_session() -> None:
    """Of this one they grow as it computes."""
    before, deadline = session_cpu_seconds(os.getsid(0)), time.process_time() + 0.05
    while time.process_time() < deadline:
        pass
    assert session_cpu_seconds(os.getsid(0)) - before >= 0.03


def answered(ttft_s: float, *gaps_s: float, sent_at_s: float = 0.0) -> Answer:
    times = np.cumsum([ttft_s, *gaps_s]).tolist()
    return Answer(sent_at_s=sent_at_s, token_times_s=times)


def repeat(full: float, shared: float, equal_compute: float) -> Repeat:
    found = Repeat()
    found.ttft_s = {"full": full, "shared": shared, "ideal": equal_compute}
    found.bounds = {"shared": Bound(flop_share=0.1, num_bytes=1000, copied_bytes_per_s=10_000.0)}
    found.computed = found.equal_computed = {"shared": 10}
    return found


def test_the_time_to_first_token_is_compared_with_its_bound() -> None:
    """of_bound is the speedup over that of the bound: full over a tenth of it and the copies."""
    found = ttft.summary([repeat(10.0, 2.0, 1.0), repeat(10.0, 2.2, 1.0), repeat(10.0, 1.8, 1.0)], 100)
    assert found["speedup"] == pytest.approx(5.0)
    assert found["bound"]["seconds"] == pytest.approx(1.1)
    assert found["bound"]["speedup"] == pytest.approx(10 / 1.1)
    assert found["of_bound"] == pytest.approx(found["speedup"] / found["bound"]["speedup"])
    assert found["of_equal_compute"] == found["of_ideal"] == pytest.approx(0.5)
    assert found["tokens"]["computed_fraction"] == 0.1
    assert found["intervals"]["of_bound"]["low"] < 0.55 < found["intervals"]["of_bound"]["high"]
    assert "even" not in found, "only full, shared and the equal-compute prefix hit were measured"


def test_long_prompts_are_measured_less_often() -> None:
    """By default three times above 8,000 tokens, else seven times."""
    assert (ttft.Config().num_repeats, ttft.Config(prompt_tokens=30_000).num_repeats) == (7, 3)
    assert ttft.Config(prompt_tokens=30_000, repeats=5).to_json()["repeats"] == 5
    assert not ttft.Config(prompt_tokens=8000).is_long


def played(ttft_s: list[float], *, seconds: float, cpu_s: float, flops: int) -> Load:
    """Half of the requests near, half unrelated."""
    prompt = unrelated_prompt(np.random.default_rng(0), 8)
    requests = [Request(prompt, 2, is_near=number % 2 == 0) for number in range(len(ttft_s))]
    return Load(requests, [answered(each, 0.1) for each in ttft_s], seconds, cpu_s, flops)


def test_a_load_is_compared_with_what_decoding_leaves() -> None:
    """P is what the prefills alone took per operation; (P + D) / (cP + D) is the bound of the throughput."""
    mixed = {
        "plain": [played([4.0, 5.0], seconds=10.0, cpu_s=20.0, flops=100)],
        "shared": [played([1.0, 4.0], seconds=5.0, cpu_s=12.0, flops=40)],
    }
    unrelated = {
        "plain": [played([3.0, 3.0], seconds=4.0, cpu_s=8.0, flops=50)],
        "shared": [played([3.3, 3.3], seconds=5.0, cpu_s=8.4, flops=50)],
    }
    prefills = [played([2.0, 2.0], seconds=4.0, cpu_s=4.0, flops=25)]
    found = closed_figures({"mixed": mixed, "unrelated": unrelated}, prefills)
    assert (found["prefill_s"], found["decode_s"], found["flop_share"]) == (16.0, 4.0, 0.4)
    assert found["bound"] == pytest.approx(20 / (0.4 * 16 + 4))
    assert found["throughput_ratio"] == 2.0
    assert found["of_bound"] == pytest.approx(2.0 / found["bound"])
    assert found["near_ttft_ratio"] == pytest.approx(0.25)
    assert found["ttft_p50_ratio"] == pytest.approx(2.5 / 4.5)
    assert found["unrelated_ttft_ratio"] == pytest.approx(1.1)
    assert found["unrelated_cpu_loss"] == pytest.approx(0.05)
    assert found["unrelated_loss"] == pytest.approx(0.2)
    assert found["mixed"]["plain"]["cpu_s_per_request"] == [10.0]


def test_an_open_loop_has_quantiles_at_each_rate() -> None:
    """Milliseconds, over all repeats."""
    both = {name: [played([1.0, 2.0, 3.0], seconds=6.0, cpu_s=0, flops=0)] for name in load.ARMS}
    found = open_figures(0.5, both)
    assert found["rate"] == 0.5
    assert found["shared"]["ttft"]["all"] == pytest.approx({"p50_ms": 2000.0, "p95_ms": 2900.0})
    assert found["plain"]["ttft"]["near"]["p50_ms"] == pytest.approx(2000.0)
    assert found["plain"]["completed_per_s"] == 0.5


def test_an_open_loop_compares_both_arms_in_each_repeat() -> None:
    """The median ratio of each kind of requests, and its interval."""
    both = {
        "plain": [played([2.0, 2.0], seconds=6.0, cpu_s=0, flops=0)] * 2,
        "shared": [played([each, each], seconds=6.0, cpu_s=0, flops=0) for each in (1.0, 0.5)],
    }
    found = open_figures(0.5, both)
    assert (found["ttft_p50_ratio"], found["near_ttft_ratio"]) == (0.375, 0.375)
    assert found["intervals"]["unrelated_ttft_ratio"] == pytest.approx(interval([0.5, 0.25]))


def test_arrivals_are_a_poisson_stream() -> None:
    """So many a second, ascending, and the same ones for the same seed."""
    times = poisson_arrivals(np.random.default_rng(1), 4000, per_s=2.0)
    assert times == poisson_arrivals(np.random.default_rng(1), 4000, per_s=2.0)
    gaps = np.diff(times)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)


def test_rates_are_numbers_with_commas() -> None:
    assert load.Config(rate="0.5,2").rates == [0.5, 2.0]
    assert load.Config().rates == []
    for wrong in ("", "0", "1,x", "-1", "inf"):
        with pytest.raises(ConfigError, match="--rate"):
            load.Config(rate=wrong).rates  # noqa: B018  it raises


class _Echo:
    """Answers at once."""

    async def complete(self, prompt: object, *, max_tokens: int, extra: object) -> Answer:
        return answered(0.0, sent_at_s=time.perf_counter())


async def test_an_open_loop_waits_for_no_answer() -> None:
    """Requests go out at their times."""
    prompt, began = unrelated_prompt(np.random.default_rng(0), 4), time.perf_counter()
    requests = [Request(prompt, 1, is_near=None)] * 3
    found = await play_open(_Echo(), requests, [0.0, 0.05, 0.1])  # type: ignore[arg-type]  # all it needs
    sent = [answer.sent_at_s - began for answer in found.answers]
    assert 0.04 <= sent[1] < sent[2]
    assert sent[2] >= 0.09


def test_steps_with_a_load_or_a_save_are_affected() -> None:
    """Four gaps from 1 to 5 s: a request's work ends at its first token at 3 s, and its save 0.5 s later."""
    stream = answered(1.0, 1.0, 1.0, 1.0, 1.0)
    planned = answered(2.0, sent_at_s=1.0)
    report = FinishedReport("1", "approx", None, stage_seconds={"write": 0.25, "pass": 0.25, "save": 0.5})
    assert Scene([stream], [planned], [report]).affected_steps == pytest.approx(2 / 4)
    assert Scene([stream], [], []).affected_steps == 0


def test_interference_is_compared_with_prefix_hits() -> None:
    """Of the times between tokens the 99th percentile and the longest, of what came the median."""
    streams = answered(1.0, *[0.1] * 98, 0.4, 0.8)
    others = answered(1.0, *[0.1] * 98, 0.4, 0.4)
    report = FinishedReport("1", "approx", None, stage_seconds={"pass": 0.2})
    shared = Scene([streams], [answered(0.6, sent_at_s=1.0)], [report])
    found = interference.summary([shared, shared], [Scene([others], [answered(0.5)])] * 2)
    assert found["itl_max_ratio"] == pytest.approx(2.0)
    assert found["planned_ttft_ratio"] == pytest.approx(1.2)
    assert found["itl_p99_ratio"] == pytest.approx(1.01, abs=0.02)
    assert 0 < found["affected_steps"] < 0.1
    assert found["intervals"]["itl_max_ratio"] == pytest.approx({"low": 2.0, "high": 2.0})
    assert set(found["intervals"]) == {
        "itl_p99_ratio",
        "itl_max_ratio",
        "affected_steps",
        "planned_ttft_ratio",
    }


def test_planned_requests_come_while_all_answers_run() -> None:
    """With two steps each, a load or pass and a save, they affect at least a fifth of the steps."""
    config = interference.Config()
    assert config.arrivals[0] == 8
    assert config.arrivals[-1] <= config.tokens - config.every
    assert 2 * len(config.arrivals) / config.tokens >= 0.2
