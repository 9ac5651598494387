"""What a short request is spared: threads that it need not wait for, and work before its answer is out."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.tokenizer import is_short
from kvshare.engine import Delta, Event, Finished, Started
from kvshare.sharing.cost import PREFILL
from tests.kvshare.embedded.tiny_engine import engine_at, events, prompt, report_of, request
from tests.proxy.embedded_server import running_embedded

LONG = "a long text " * 200


@pytest.mark.parametrize(("text", "is_at_once"), [("a short text", True), (LONG, False)])
async def test_short_texts_are_tokenized_at_once(engine: EmbeddedEngine, text: str, is_at_once: bool) -> None:
    """On the event loop's thread; longer ones in another, so that nothing waits for them."""
    encoder, threads = engine.server.encoder, list[threading.Thread]()
    chat = Chat(({"role": "user", "content": text},))
    with (
        patch.object(encoder, "encode_text", _noting(encoder.encode_text, threads)),
        patch.object(encoder, "encode_chat", _noting(encoder.encode_chat, threads)),
        patch.object(encoder, "encode_tokens", _noting(encoder.encode_tokens, threads)),
    ):
        await engine.encode_text(text)
        await engine.encode_chat(chat)
        await engine.encode_tokens([20] * len(text))
    assert [thread is threading.current_thread() for thread in threads] == [is_at_once] * 3


def _noting(encode: Callable[..., Any], threads: list[threading.Thread]) -> Callable[..., Any]:
    def noting(given: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(given)

    return noting


@pytest.mark.parametrize(
    "chat",
    [
        Chat(({"role": "user", "content": "Hi"},), tools=({"type": "function"},)),
        Chat(({"role": "user", "content": "Hi"},), template_kwargs={"documents": [LONG] * 1000}),
        Chat(({"role": "assistant", "content": "", "tool_calls": [{"id": LONG * 1000}]},)),
        Chat(({"role": "user", "content": LONG[:1500]}, {"role": "user", "content": LONG[:1500]})),
        Chat(({"role": "user", "content": ""},) * 1000),
    ],
)
def test_only_a_few_plain_messages_are_short(chat: Chat) -> None:
    """Everything else may take the template long, however short each text is."""
    assert not is_short(chat)
    assert is_short(Chat(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})))


@pytest.mark.parametrize(("max_tokens", "num_calls"), [(1, 1), (3, 4)])
async def test_the_last_token_comes_with_the_end(
    engine: EmbeddedEngine, max_tokens: int, num_calls: int
) -> None:
    """One call of the event loop for it, one for each other token, and one for a prompt before its answer."""
    loop, threads = asyncio.get_running_loop(), list[str]()
    call = loop.call_soon_threadsafe

    def noting(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return call(*given, **options)

    with patch.object(loop, "call_soon_threadsafe", noting):
        found = await events(engine, await request(engine, prompt(200), max_tokens=max_tokens))
    assert [type(event) for event in found] == [Started, *[Delta] * max_tokens, Finished]
    assert len([name for name in threads if name.startswith("kvshare-compute")]) == num_calls


async def test_choices_that_end_at_different_times_are_sent_at_once(engine: EmbeddedEngine) -> None:
    """Only what is the end of all of them waits for the release."""
    wanted = await request(engine, prompt(200), n=2, max_tokens=3, temperature=1.0, seed=1)
    found = await events(engine, wanted)
    last = {event.choice: event.finish_reason for event in found if isinstance(event, Delta)}
    assert set(last) == {0, 1}
    assert None not in last.values()
    assert isinstance(found[-1], Finished)
    assert found[-1].num_completion_tokens == sum(e.num_tokens for e in found if isinstance(e, Delta))


async def test_a_prompt_with_one_token_of_answer_is_stored(engine: EmbeddedEngine) -> None:
    """After the answer: the next request finds it, and the event has its node."""
    wanted = await request(engine, prompt(200), max_tokens=1)
    first = await events(engine, wanted)
    (node,) = engine.sharing.tree.nodes()
    assert isinstance(first[0], Started)
    assert (node.num_tokens, first[0].stored.node) == (200, node.node_id)
    assert report_of((await events(engine, wanted))[0]).num_exact == 199


async def test_prompts_that_wait_for_one_with_a_token_of_answer_share_it(engine: EmbeddedEngine) -> None:
    """It counts as stored as soon as it is, although that is after its answer."""
    wanted = await request(engine, prompt(400), max_tokens=1)
    found = await asyncio.gather(*(events(engine, replace(wanted, request_id=str(n))) for n in range(3)))
    assert sorted(report_of(each[0]).num_exact for each in found) == [0, 399, 399]


@pytest.mark.parametrize("store", [True, False])
async def test_costs_are_learned_after_the_answer(tmp_path: Path, store: bool) -> None:
    """Also from a prompt that is not stored."""
    engine = engine_at(tmp_path, **{"cost.learn": True})
    await engine.start()
    try:
        wanted = replace(await request(engine, prompt(200), max_tokens=1), store=store)
        known = list[bool]()

        def note(event: Event) -> None:
            if isinstance(event, Finished):
                known.append(PREFILL in engine.sharing.cost.measured)

        await engine.generate(wanted, note)
        await engine.settle()
        assert known == [False]
        assert PREFILL in engine.sharing.cost.measured
    finally:
        await engine.stop()


async def test_an_answer_is_written_before_its_prompt_is_stored() -> None:
    """Storing takes the interpreter, so it would delay the answer."""
    order = list[str]()
    async with running_embedded() as server:
        keeper, write = server.engine.server.runtime.keeper, web.Response.write_eof
        store = keeper.store_prompt

        async def writing(response: web.Response, *given: Any) -> None:
            await write(response, *given)
            order.append("written")

        def storing(*given: Any) -> Any:
            order.append("stored")
            return store(*given)

        with patch.object(web.Response, "write_eof", writing), patch.object(keeper, "store_prompt", storing):
            await server.chat(("user", "Who are you? " * 20), max_tokens=1)
    assert order == ["written", "stored"]
