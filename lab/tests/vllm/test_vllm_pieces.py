"""The pieces of the vLLM benchmarks that need no server."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvshare.conversation.chat import Chat
from kvshare.demo import MODEL_PATH
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.errors import EngineError, LogError
from kvshare.replay.workloads import generate, write_rows
from kvshare_lab.bench.random_models import DEMO_VOCAB_SIZE
from kvshare_lab.vllm import parity, steady
from kvshare_lab.vllm.client import Answer, Counters
from kvshare_lab.vllm.kinds import ILLUSTRATED, SERVED, served_config, write_served_kind
from kvshare_lab.vllm.load import Config, given_sequence, new_sequence
from kvshare_lab.vllm.parity import distance
from kvshare_lab.vllm.prompts import Mixture, Op, near_duplicate, unrelated_prompt
from kvshare_lab.vllm.sequences import read_prompts
from kvshare_lab.vllm.servers import Server, VllmOptions, running
from kvshare_lab.vllm.soak import Verdict, are_right, judge
from kvshare_lab.vllm.stack import BenchConfig, StackOptions


def answer(*token_ids: int, margin: float = 1.0, aborted: bool = False) -> Answer:
    """Tokens whose second choice is `margin` less likely."""
    tops: list[Mapping[int, float]] = [{token: -0.5, token + 1: -0.5 - margin} for token in token_ids]
    return Answer(token_ids=list(token_ids), logprobs=[-0.5] * len(tops), tops=tops, aborted=aborted)


def test_an_equal_answer_is_right() -> None:
    """Token for token, of the same length."""
    assert judge(answer(1, 2, 3), answer(1, 2, 3)).name == "right"


def test_a_different_token_is_wrong() -> None:
    """The verdict has the place and the margin."""
    verdict = judge(answer(1, 9, 3), answer(1, 2, 3))
    assert (verdict.name, verdict.first_difference, verdict.margin) == ("wrong", 1, 1.0)
    assert verdict.agreement == pytest.approx(1 / 3)


def test_a_different_token_at_even_odds_is_a_tie() -> None:
    """Rounding may go either way there, and what follows is another text."""
    assert judge(answer(1, 9, 3), answer(1, 2, 3, margin=5e-4)).name == "tied"


def test_a_short_answer_is_wrong_unless_the_client_hung_up() -> None:
    """A server that stops early has lost something."""
    assert judge(answer(1, 2), answer(1, 2, 3)).name == "wrong"
    assert judge(answer(1, 2, aborted=True), answer(1, 2, 3)).name == "right"


def judged(mode: str, found: Answer, expected: Answer) -> tuple[Op, Verdict]:
    return Op("repeat", mode, unrelated_prompt(np.random.default_rng(0), 4)), judge(found, expected)


def test_where_values_are_coarse_answers_are_judged_by_those_that_share_nothing() -> None:
    """Equal, or as far as 2.5 times the noise; a short one is wrong however much noise there is."""
    unshared = judged("off", answer(1, 9), answer(1, 2, margin=0.2))
    near, far = (judged("exact", answer(1, 9), answer(1, 2, margin=margin)) for margin in (0.3, 0.9))
    short = judged("exact", answer(1), answer(1, 2))
    right = judged("exact", answer(1), answer(1))
    assert are_right([right], of_noise=None)
    assert not are_right([unshared, near], of_noise=None)
    assert are_right([unshared, near], of_noise=2.5)
    assert not are_right([unshared, far], of_noise=2.5)
    assert not are_right([unshared, short], of_noise=2.5)
    assert not are_right([near], of_noise=2.5), "no noise was seen"


def test_parity_counts_tokens_that_one_side_does_not_name() -> None:
    """They are at most as likely there as the last one it names; equal answers are at distance 0."""
    assert distance(answer(1, 2), answer(1, 2)) == 0.0
    assert distance(answer(1, 2, margin=1.0), answer(1, 2, margin=1.25)) == pytest.approx(0.25)
    assert distance(answer(1, 5), answer(1, 2)) == pytest.approx(1.0)


def test_a_near_duplicate_differs_near_the_top() -> None:
    """As many tokens as asked for, the first within the first hundredth, the length unchanged."""
    rng = np.random.default_rng(0)
    donor = unrelated_prompt(rng, 2000)
    edited = near_duplicate(rng, donor, changed=0.1, edits=5)
    differing = np.nonzero(donor != edited)[0]
    assert len(edited) == 2000
    assert 0.09 < len(differing) / 2000 <= 0.1
    assert 20 <= differing[0] < 30


def test_a_sequence_mixes_kinds_and_never_repeats() -> None:
    """Half and half, shuffled, and every prompt new."""
    rng = np.random.default_rng(0)
    donors = [unrelated_prompt(rng, 200) for _ in range(3)]
    config = Config(prompt_tokens=200, changed=0.1, edits=2, min_output=4, max_output=8)
    requests = new_sequence(rng, config, donors, num_requests=20)
    assert sum(request.is_near is True for request in requests) == 10
    assert len({request.prompt.tobytes() for request in requests}) == 20
    assert {request.is_near for request in requests[:10]} == {True, False}


def test_a_workload_is_sent_from_its_top_in_its_order(tmp_path: Path) -> None:
    """As the chat template arranges the messages; long prompts keep their head."""
    rows = list(generate("template", num_requests=6, seed=0))
    write_rows(rows, tmp_path / "template.jsonl.gz")
    given = read_prompts(tmp_path / "template.jsonl.gz", num_prompts=4, max_tokens=150)
    encoder = PromptEncoder.load(MODEL_PATH)
    whole = [encoder.encode_chat(Chat(tuple(row.messages))).token_ids.tolist() for row in rows[:4]]
    assert [prompt.tolist() for prompt in given.prompts] == [tokens[:150] for tokens in whole]
    assert given.description["num_cut"] == sum(len(tokens) > 150 for tokens in whole) > 0
    config = Config(prompt_tokens=150, changed=0.1, edits=2, min_output=4, max_output=8)
    requests = given_sequence(np.random.default_rng(0), config, given.prompts)
    assert [request.prompt.tolist() for request in requests] == [tokens[:150] for tokens in whole]
    assert {request.is_near for request in requests} == {None}


def test_a_workload_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    """Too few prompts, or tokens of another model: the file is named, and the line."""
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "one"}\nno json\n{"token_ids": [5, 90000]}\n', encoding="utf-8")
    with pytest.raises(LogError, match=r"few\.jsonl, line 3: token 90000"):
        read_prompts(file, num_prompts=2, max_tokens=100)
    file.write_text('{"prompt": "one"}\nno json\n', encoding="utf-8")
    with pytest.raises(LogError, match=r"few\.jsonl has 1 prompts, and 1 lines that cannot be read; 2 are"):
        read_prompts(file, num_prompts=2, max_tokens=100)


def test_unrelated_prompts_may_never_be_approximate() -> None:
    """In no mode; nor may any request that did not ask for it."""
    mixture = Mixture(np.random.default_rng(0), min_prompt=20, max_prompt=60, max_prompts=10)
    ops = []
    for _ in range(200):
        ops.append(mixture.draw())
        mixture.remember(ops[-1].prompt)
    assert {op.kind for op in ops} == {"stranger", "repeat", "edited", "continued"}
    for op in ops:
        assert op.may_be_approximate == (op.mode == "approx" and op.kind != "stranger")
        assert 1 <= len(op.prompt) < 120
    assert 0 < sum(op.aborts for op in ops) < 100


def test_counters_add_up_by_label() -> None:
    """Differences between two moments, over the labels that were asked for."""
    name = "kvshare_stage_duration_seconds"
    plan, search = frozenset({("stage", "plan")}), frozenset({("stage", "search")})
    before = Counters({(f"{name}_sum", plan): 1.0, (f"{name}_count", plan): 10.0})
    after = Counters(
        {
            (f"{name}_sum", plan): 1.5,
            (f"{name}_count", plan): 20.0,
            (f"{name}_sum", search): 0.2,
            (f"{name}_count", search): 2.0,
        }
    )
    assert after.since(before).stage_ms == pytest.approx({"plan": 50.0, "search": 100.0})
    assert after.total(f"{name}_count") == 22.0
    assert after.by(f"{name}_count", "stage") == {"plan": 20.0, "search": 2.0}


def test_a_steady_store_is_smaller_than_what_comes() -> None:
    """It holds the popular prompts, and not even three batches more."""
    config = steady.Config(batches=6, prompt_tokens=1000)
    popular = config.families * config.prompt_tokens
    unrelated = 3 * config.strangers * config.prompt_tokens
    assert popular < config.capacity_tokens < popular + unrelated + 3 * config.recipients * 200


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    """The error names the server and what it said last."""
    server = Server(
        name="the proxy",
        command=[sys.executable, "-c", "print('no such model'); raise SystemExit(1)"],
        url="http://127.0.0.1:9",
        log_path=tmp_path / "log",
    )
    said = r"(?s)the proxy ended while starting.*no such model"
    with pytest.raises(EngineError, match=said), running([server]):
        pass


def test_the_error_of_parity_is_the_larger_of_both_modes() -> None:
    """Neither mode hides behind the other, and the document shows each."""
    modes = {name: {"max_abs_logprob_error": error} for name, error in (("compiled", 3e-5), ("eager", 1e-6))}
    document = parity.summary(modes, parity.Config(tokens=100))
    assert document["max_abs_logprob_error"] == 3e-5
    assert document["modes"] == modes


def test_vllm_compiles_by_default() -> None:
    """Benchmarks measure what users run."""
    assert "--enforce-eager" not in VllmOptions().arguments
    assert "--enforce-eager" in VllmOptions(enforce_eager=True).arguments


def test_both_vllms_get_the_same_cores() -> None:
    """By default all but one; never none."""
    assert VllmOptions(num_threads=1).cores == VllmOptions().cores[-1:]
    assert len(VllmOptions().cores) >= 1


@pytest.mark.parametrize("name", sorted(SERVED))
def test_every_kind_can_be_a_benchmarks_model(name: str) -> None:
    """Its size is known before it is written, and it has the words of its tokenizer."""
    num_words = served_config(name).get_text_config().vocab_size
    assert num_words >= DEMO_VOCAB_SIZE or name == ILLUSTRATED
    assert StackOptions(name).has_random_weights
    assert BenchConfig().bytes_per_token(name) > 0


@pytest.mark.parametrize(("name", "width"), [("gemma4", 171), ("qwen2-vl", 128)])
def test_the_size_of_a_kind_is_its_language_models(name: str, width: int) -> None:
    """Of two layers with heads of 32 and one with heads of 64 the mean; a tower does not count."""
    size = StackOptions(name).model_size
    assert (size.num_layers, size.hidden_size, size.attention_width) == (3, 128, width)


def test_a_kind_is_written_with_the_demo_models_tokenizer(tmp_path: Path) -> None:
    """A server can apply its template."""
    from transformers import AutoConfig

    folder = write_served_kind("glm", tmp_path / "glm")
    assert (folder / "chat_template.jinja").read_bytes() == (MODEL_PATH / "chat_template.jinja").read_bytes()
    assert AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size == DEMO_VOCAB_SIZE
