"""First light: the real command, the real model, the real `openai` client, a real socket."""

from typing import Any

import openai
import pytest

from kvshare_lab.demo_model.pairs import Pair, near_duplicate_pairs
from tests.conftest import Server

MODEL = "kvshare-demo"


def client_for(server: Server, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key(name), max_retries=0)


def pair(seed: int) -> Pair:
    return next(near_duplicate_pairs(seed=seed, count=1))


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **body: object) -> tuple[str, dict[str, Any]]:
    """The answer's text and its tokens by source."""
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # plain dictionaries
        temperature=0,
        max_tokens=12,
        extra_body={"kvshare": body} if body else None,
    )
    usage = reply.usage
    assert usage is not None
    assert usage.model_extra is not None
    shared = usage.model_extra["kvshare"]
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == shared["exact"] + shared["copied"]
    total = sum(shared[source] for source in ("exact", "copied", "recomputed", "repaired"))
    assert total == usage.prompt_tokens
    return reply.choices[0].message.content or "", shared


def test_a_near_duplicate_is_served_from_another_prompts_kv(server: Server) -> None:
    """The second user's prompt is mostly not computed."""
    forms = pair(1)
    with client_for(server, "ann") as ann, client_for(server, "bob") as bob:
        _, first = ask(ann, forms.donor_messages)
        server.settle()
        _, second = ask(bob, forms.recipient_messages)
    assert first["decision"] == "full"
    assert second["decision"] == "approx"
    assert second["copied"] > 0
    assert 0 < second["expected_deviation"] < second["max_deviation"] == 0.05
    assert second["exact"] + second["copied"] > 2 * (second["recomputed"] + second["repaired"])


def test_a_request_lowers_the_limit_of_deviation_and_cannot_raise_it(server: Server) -> None:
    """Its usage says which limit decided; what is above it is computed."""
    forms = pair(5)
    with client_for(server, "ann") as ann:
        ask(ann, forms.donor_messages, no_store=False)
        server.settle()
        _, none = ask(ann, forms.recipient_messages, max_deviation=0, no_store=True)
        _, most = ask(ann, forms.recipient_messages, max_deviation=9, no_store=True)
    assert (none["decision"], none["reason"], none["max_deviation"]) == ("exact", "deviates_too_much", 0)
    assert none["expected_deviation"] > 0
    assert (most["decision"], most["max_deviation"]) == ("approx", 0.05)


def test_the_next_turn_of_a_chat_finds_the_whole_chat(server: Server) -> None:
    """Prompt and answer of the turn before are an exact prefix, and the answer is the unshared one."""
    messages = pair(2).donor_messages
    with client_for(server, "ann") as ann:
        answer, first = ask(ann, messages, mode="exact")  # other forms are like it
        server.settle()
        turn = [
            *messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And the other?"},
        ]
        shared_answer, second = ask(ann, turn)
        plain_answer, plain = ask(ann, turn, mode="off")
    assert second["exact"] >= sum(first[s] for s in ("exact", "copied", "recomputed", "repaired")) - 1
    assert second["decision"] == "exact"
    assert plain == {
        **plain,
        "exact": 0,
        "copied": 0,
        "reason": "off",
    }
    assert shared_answer == plain_answer


def test_streams_carry_the_same_usage(server: Server) -> None:
    """The last chunk of a stream tells the tokens by source."""
    messages = pair(3).donor_messages
    with client_for(server, "ann") as ann:
        chunks = list(
            ann.chat.completions.create(  # type: ignore[call-overload]  # plain dictionaries
                model=MODEL,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=4,
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_extra is not None
    assert chunks[-1].usage.model_extra["kvshare"]["recomputed"] > 0


@pytest.mark.parametrize("mode", ["off", "exact", "approx"])
def test_modes_are_obeyed(server: Server, mode: str) -> None:
    """Off shares nothing, exact no copies, approx both."""
    forms = pair(4)
    with client_for(server, "ann") as ann:
        ask(ann, forms.donor_messages)
        server.settle()
        _, shared = ask(ann, forms.recipient_messages, mode=mode, no_store=True)
    assert (shared["exact"] > 0) == (mode != "off")
    assert (shared["copied"] > 0) == (mode == "approx")


def test_a_prompt_that_is_too_long_is_an_openai_error(server: Server) -> None:
    """With the code that clients look for, and the server goes on."""
    with client_for(server, "ann") as ann:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(ann, [{"role": "user", "content": "one two three " * 5000}])
        assert caught.value.code == "context_length_exceeded"
        ask(ann, [{"role": "user", "content": "still there?"}])
