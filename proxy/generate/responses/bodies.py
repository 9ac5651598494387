"""
The body of /v1/responses, checked: a pydantic model. Its input items become a chat's turns.

Parameters that this server does not implement are refused where ignoring them would change the answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.engine import SamplingParams
from kvshare.errors import RequestError, UnsupportedParameterError
from proxy.cache_salt import CacheSalt
from proxy.generate import body_parts
from proxy.generate.fields import Name
from proxy.generate.unsupported import RESPONSES
from proxy.request_body import KVShareField, at_most
from proxy.wrong_values import invalid, wrong

_NO_MEDIA = "this server reads no images, files or audio"
_SEND_ITEMS = "this server stores nothing and runs no tools, so send every item itself"
_LOGPROBS = "message.output_text.logprobs"
_Function = body_parts.check_type("function", hint="this server runs no tools itself")


def _is_object(arguments: str) -> str:
    try:
        if isinstance(json.loads(arguments or "{}"), dict):
            return arguments
    except (ValueError, RecursionError):
        pass
    raise wrong("the JSON text of an object", arguments)


class TextPart(body_parts.BodyPart):
    """A piece of a message; a refusal is one, too."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(body_parts.BodyPart):
    """An assistant's refusal, in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_Text = body_parts.check_type("input_text", "output_text", "text", "refusal", hint=_NO_MEDIA)
Content = Annotated[
    list[Annotated[TextPart | RefusalPart, Discriminator("type"), BeforeValidator(_Text)]],
    Field(fail_fast=True),
    body_parts.text_as("input_text"),
]


class MessageItem(body_parts.BodyPart):
    """A message. A developer is a system by another name."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(body_parts.BodyPart):
    """An assistant's call of a tool."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Annotated[str, AfterValidator(_is_object)]


class CallOutputItem(body_parts.BodyPart):
    """A tool's answer."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ReasoningItem(body_parts.BodyPart):
    """An assistant's thoughts. They are dropped: templates show no earlier thoughts."""

    type: Literal["reasoning"]


_Known = body_parts.check_type(
    "message", "function_call", "function_call_output", "reasoning", default="message", hint=_SEND_ITEMS
)
Item = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, Discriminator("type"), BeforeValidator(_Known)
]


Input = Annotated[
    list[Item],
    Field(min_length=1, fail_fast=True),
    body_parts.text_or_list(lambda text: {"type": "message", "role": "user", "content": text}),
]


class ResponsesTool(body_parts.BodyPart):
    """A function that the client runs, in the flat shape of this API."""

    type: Literal["function"]
    name: body_parts.ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


Tools = Annotated[list[Annotated[ResponsesTool, BeforeValidator(_Function)]], at_most(body_parts.MAX_TOOLS)]


class NamedTool(body_parts.BodyPart):
    """The only function that may be called."""

    type: Literal["function"]
    name: str


class AllowedTools(body_parts.BodyPart):
    """Some of the tools; the others are as if they were not there."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedTool, BeforeValidator(_Function)]], Field(min_length=1)]

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}


ResponsesToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class PlainFormat(body_parts.BodyPart):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(body_parts.BodyPart):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TextConfig(body_parts.BodyPart):
    """The form of the answer's text. `verbosity` is a hint, and ignored."""

    format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] = PlainFormat(type="text")

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        if isinstance(self.format, SchemaFormat):
            return self.format.schema_
        return {"type": "object"} if self.format.type == "json_object" else None


class ReasoningOptions(body_parts.BodyPart):
    """`effort` is for templates that know `reasoning_effort`; summaries are not written."""

    effort: body_parts.Effort | None = None


class ResponsesBody(body_parts.BodyPart):
    """POST /v1/responses"""

    model: Name
    input: Input
    instructions: str | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: body_parts.MaxTokens | None = None
    temperature: body_parts.Temperature | None = None
    top_p: body_parts.TopP | None = None
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"  # either way what does not fit is refused
    stream: bool = False
    kvshare: KVShareField = None
    cache_salt: CacheSalt = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises RequestError."""
        RESPONSES.refuse(self.model_extra or {})
        if _LOGPROBS in self.include:
            problem = f"'{_LOGPROBS}': not implemented for responses; use /v1/chat/completions"
            raise UnsupportedParameterError("include", problem)
        names = [tool.name for tool in self.tools]
        choice = self._tool_choice
        body_parts.check_tools(names, chosen=choice.name, required=choice.use is ToolUse.REQUIRED)
        if isinstance(self.tool_choice, AllowedTools) and not self.tool_choice.names <= set(names):
            raise invalid("tool_choice.tools", "expected names of 'tools' only, got another")
        return self

    @property
    def chat(self) -> Chat:
        """Raises RequestError for a call's output without the call."""
        tools, choice, effort = self.tools, self.tool_choice, self.reasoning.effort
        if isinstance(choice, AllowedTools):
            tools = [tool for tool in tools if tool.name in choice.names]
        # Templates ignore what they do not know; some know an effort, some only whether to think.
        thinking = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return Chat(
            messages=tuple(self._messages),
            tools=tuple(
                body_parts.template_tool(tool.name, tool.description, tool.parameters, strict=tool.strict)
                for tool in tools
            ),
            tool_choice=self._tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            answer_schema=self.text.answer_schema,
            answer_param="text.format",
            template_kwargs={} if effort is None else thinking,
        )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )

    @property
    def echo(self) -> dict[str, Any]:
        """Return what a response says of the request that it answers. Raises RequestError if it cannot."""
        try:
            fields = self.model_dump(mode="json", by_alias=True, include=_ECHOED)
        except ValueError:  # pydantic takes more than 255 levels for a circle
            raise RequestError("The JSON body is nested too deeply to be answered.") from None
        extra = self.model_extra or {}
        return {
            **fields,
            "metadata": extra.get("metadata") or {},
            "user": extra.get("user"),
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
            "service_tier": "default",
            "top_logprobs": 0,
        }

    @property
    def _messages(self) -> list[dict[str, Any]]:
        turns = body_parts.MessageTurns()
        if self.instructions:
            turns.add_text("system", self.instructions)
        for number, item in enumerate(self.input):
            if isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                turns.add_text(role, body_parts.joined(each.text for each in item.content))
            elif isinstance(item, CallItem):
                turns.call(item.call_id, item.name, json.loads(item.arguments or "{}"))
            elif isinstance(item, CallOutputItem):
                output = body_parts.joined(each.text for each in item.output)
                turns.result(item.call_id, output, param=f"input[{number}].call_id")
        turns.check_complete(param="input")
        return turns.messages

    @property
    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice(ToolUse.REQUIRED, self.tool_choice.name)
        if isinstance(self.tool_choice, AllowedTools):
            return ToolChoice(ToolUse(self.tool_choice.mode))
        return ToolChoice(ToolUse(self.tool_choice))


_ECHOED = {
    *("instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
    *("max_output_tokens", "temperature", "top_p"),
}
