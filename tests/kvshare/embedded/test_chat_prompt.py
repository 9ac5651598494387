"""A chat becomes the text that the model's own template makes of it, tools and all."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvshare.conversation.chat import Chat
from kvshare.conversation.tools import ToolFormat, with_tool_block
from kvshare.demo import MODEL_PATH
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.errors import ContextLengthError, RequestError

WITH_TOOLS = """\
{%- for tool in tools or [] %}[TOOL {{ tool.function.name }}]{% endfor -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor -%}
{% endfor %}{{ '<think>' if thinking }}{% if add_generation_prompt %}<assistant>{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bergen"}}}
QUESTION = {"role": "user", "content": "Does it rain in Bergen?"}
TURNS = (
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "yes"},
)


def encoder(template: str | None = None) -> PromptEncoder:
    """The demo model's tokenizer, with its own template or another."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    if template is not None:
        tokenizer.chat_template = template
    return PromptEncoder(tokenizer)


def test_a_template_that_takes_tools_gets_them() -> None:
    """As they came, with calls and answers of tools; a null content is an empty text."""
    text = encoder(WITH_TOOLS).render_chat(Chat(TURNS, tools=(WEATHER,)))
    said = "<user>Does it rain in Bergen?<assistant><tool_call>weather</tool_call><tool>yes<assistant>"
    assert text == f"[TOOL weather]{said}"


def test_a_template_without_tools_gets_the_system_block() -> None:
    """The demo's template knows three roles: it renders what `with_tool_block` makes of the chat."""
    demo = encoder()
    chat = Chat(tuple({**turn, "content": turn["content"] or ""} for turn in TURNS), tools=(WEATHER,))
    text = demo.render_chat(replace(chat, messages=TURNS))
    assert text == demo.render_chat(Chat(with_tool_block(chat).chat.messages))
    assert '"name": "weather"' in text
    assert "<tool_response>\nyes" in text


def test_without_tools_nothing_is_added() -> None:
    """A plain chat is rendered as before."""
    assert (
        encoder().render_chat(Chat((QUESTION,)))
        == "<|begin|><|user|>\nDoes it rain in Bergen?<|end|><|assistant|>"
    )


def test_the_last_message_is_continued() -> None:
    """The prompt ends within it: no end-of-turn, no new assistant."""
    chat = Chat((QUESTION, {"role": "assistant", "content": "Yes, it"}), continue_final_message=True)
    assert encoder().render_chat(chat).endswith("<|assistant|> Yes, it")


def test_a_last_message_that_the_template_changes_cannot_be_continued() -> None:
    """The refusal quotes nothing of the chat."""
    chat = Chat((QUESTION, {"role": "assistant", "content": "SECRET"}), continue_final_message=True)
    shouting = "{% for message in messages %}{{ message.content | lower }}{% endfor %}"
    with pytest.raises(RequestError, match="cannot be continued") as refusal:
        encoder(shouting).render_chat(chat)
    assert refusal.value.param == "messages"
    assert "SECRET" not in str(refusal.value)


def test_template_arguments_reach_the_template() -> None:
    """Such as whether a reasoning model should think."""
    chat = Chat((QUESTION,), template_kwargs={"thinking": True, "documents": []})
    assert encoder(WITH_TOOLS).render_chat(chat).endswith("<think><assistant>")


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template", "add_generation_prompt"])
def test_template_arguments_do_not_replace_the_servers_own(name: str) -> None:
    """They would change what is rendered, or how."""
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} is not") as refusal:
        encoder().render_chat(Chat((QUESTION,), template_kwargs={name: "x"}))
    assert refusal.value.param == "chat_template_kwargs"


def test_a_template_that_breaks_on_an_argument_refuses_the_chat() -> None:
    """Whatever the error is: the argument is the client's."""
    dividing = "{{ 1 // parts }}{% for message in messages %}{{ message.content }}{% endfor %}"
    for parts in (0, "x", None):
        with pytest.raises(RequestError, match="the chat template rejects these messages"):
            encoder(dividing).render_chat(Chat((QUESTION,), template_kwargs={"parts": parts}))


def test_the_prompts_text_is_what_was_rendered() -> None:
    """For the index: the last user turn as it came, and the whole."""
    prompt = encoder().encode_chat(Chat(TURNS, tools=(WEATHER,)))
    assert prompt.text.last_user_turn == QUESTION["content"]
    assert prompt.text.body == encoder().render_chat(Chat(TURNS, tools=(WEATHER,)))


def test_the_template_says_how_tools_are_called() -> None:
    """The format that a parser is chosen by."""
    assert encoder(WITH_TOOLS).tool_format is ToolFormat.HERMES
    assert encoder(WITH_TOOLS + "[TOOL_CALLS]").tool_format is ToolFormat.MISTRAL
    assert encoder().tool_format is ToolFormat.HERMES


def test_added_tokens_are_known_by_their_text() -> None:
    """Grammars name them by id."""
    added = encoder().added_tokens
    assert "<|user|>" in added
    assert all(encoder().decode_tokens([token_id]) == text for text, token_id in added.items())


def test_tokens_become_text_again() -> None:
    """Special ones included; what is in no vocabulary is refused."""
    demo = encoder()
    text = demo.render_chat(Chat((QUESTION,)))
    assert demo.decode_tokens(demo.encode_chat(Chat((QUESTION,))).token_ids.tolist()) == text
    with pytest.raises(RequestError, match="not in the vocabulary") as refusal:
        demo.decode_tokens([5, 10_000_000])
    assert refusal.value.param == "tokens"


TURN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TURN
)
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + TURN
)
DROPS_SYSTEM = TURN.replace("<{{", "{% if message.role == 'system' %}{% continue %}{% endif %}<{{")
NO_TOOL_ROLE = (
    "{{ tools | length if tools }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}" + TURN
)
NEXT_QUESTION = {"role": "user", "content": "And tomorrow?"}


@pytest.mark.parametrize(
    "messages", [(QUESTION,), TURNS, (*TURNS, NEXT_QUESTION), (*TURNS, TURNS[1], TURNS[2])]
)
@pytest.mark.parametrize(
    "template", [NO_SYSTEM, ALTERNATING, DROPS_SYSTEM, NO_SYSTEM.replace(TURN, ALTERNATING)]
)
def test_tools_come_with_the_first_question_where_a_template_takes_no_system_message(
    template: str, messages: tuple[dict[str, object], ...]
) -> None:
    """The client sent none, so that the template's refusal of one is none of its business."""
    text = encoder(template).render_chat(Chat(messages, tools=(WEATHER,)))
    assert text.startswith("<user># Tools")
    assert "</tool_response>.\n\nDoes it rain in Bergen?" in text
    assert '"name": "weather"' in text
    assert text.count("<user>") == sum(message["role"] in ("user", "tool") for message in messages) - (
        messages[-1] is NEXT_QUESTION
    )


def test_a_clients_own_system_message_stays_apart_from_the_tools() -> None:
    """Where the template drops it, or the turns do not fit, the tools are in the user's message."""
    chat = Chat(({"role": "system", "content": "Be brief."}, QUESTION), tools=(WEATHER,))
    assert encoder(TURN).render_chat(chat).startswith("<system>Be brief.\n\n# Tools")
    assert encoder(DROPS_SYSTEM).render_chat(chat).startswith("<user># Tools")


def test_a_template_without_the_role_of_tools_gets_their_history_as_text() -> None:
    """Also where it takes the tools themselves; without results they are the template's own business."""
    text = encoder(NO_TOOL_ROLE).render_chat(Chat(TURNS, tools=(WEATHER,)))
    assert text.startswith("<system># Tools")
    assert "<tool_response>\nyes" in text
    assert (
        encoder(NO_TOOL_ROLE).render_chat(Chat((QUESTION,), tools=(WEATHER,)))
        == f"1<user>{QUESTION['content']}"
    )


@pytest.mark.parametrize(
    ("shown", "as_text"),
    [("{{ message.content }}", False), ("{{ {'a': message.content} | tojson }}", False), ("", True)],
)
def test_results_that_a_template_drops_come_as_text(shown: str, as_text: bool) -> None:
    """Also where it takes tools; a template that writes them, in JSON or not, keeps its own form."""
    template = (
        "{{ tools | length if tools }}{% for message in messages %}<{{ message.role }}>"
        "{% if message.role == 'tool' %}SHOWN{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    result = {**TURNS[2], "content": 'rain, "heavy" über Bergen\nuntil seventeen'}
    chat = Chat((*TURNS[:2], result), tools=(WEATHER,))
    text = encoder(template.replace("SHOWN", shown)).render_chat(chat)
    assert "seventeen" in text
    assert ("<tool_response>" in text) == as_text


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param", "words"),
    [
        (
            NO_SYSTEM,
            ({"role": "system", "content": "Be brief."}, QUESTION),
            (),
            "messages",
            "System role not",
        ),
        (NO_SYSTEM, ({"role": "system", "content": ""}, QUESTION), (WEATHER,), "messages", "System role not"),
        (ALTERNATING, (QUESTION, QUESTION), (WEATHER,), "messages", "these messages: Roles must"),
        (
            NO_SYSTEM.replace(TURN, ALTERNATING),
            (QUESTION, QUESTION),
            (WEATHER,),
            "messages",
            "these messages: Roles must",
        ),
        (
            "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TURN,
            (QUESTION,),
            (WEATHER,),
            None,
            "",
        ),
        (
            "[TOOL_CALLS]{% if tools %}{{ raise_exception('no') }}{% endif %}" + TURN,
            (QUESTION,),
            (WEATHER,),
            "tools",
            "the description of these tools: no",
        ),
    ],
)
def test_a_refusal_names_what_the_template_refused(
    template: str,
    messages: tuple[dict[str, object], ...],
    tools: tuple[object, ...],
    param: str | None,
    words: str,
) -> None:
    """The messages if they are the client's own fault, the tools if the chat is fine without them."""
    chat = Chat(messages, tools=tools)  # type: ignore[arg-type]  # rows of a table
    if param is None:
        assert "# Tools" in encoder(template).render_chat(chat)
        return
    with pytest.raises(RequestError, match=words) as refusal:
        encoder(template).render_chat(chat)
    assert refusal.value.param == param


def test_a_prompt_that_is_not_counted_to_its_end_says_so() -> None:
    """Far too long a text is refused by a lower bound, which is called one; others are counted."""
    demo = encoder()
    demo.limit_to(max_model_len=4096, vocab_size=1536)
    text = "a word " * 1_000_000
    for param, encode in (
        ("prompt", lambda: demo.encode_text(text)),
        ("messages", lambda: demo.encode_chat(Chat(({"role": "user", "content": text},)))),
    ):
        with pytest.raises(ContextLengthError, match=r"you requested at least [0-9]+ tokens") as refusal:
            encode()
        assert refusal.value.is_bound
        assert refusal.value.param == param
    assert demo.encode_text("a word " * 5000).num_tokens > 4096
