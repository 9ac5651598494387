"""
The bodies of /v1/messages and /v1/messages/count_tokens, checked: pydantic models. Their content blocks
become a chat's turns.

Parameters that this server does not implement are refused where ignoring them would change the answer.
`cache_control` is accepted and ignored: prompts are cached anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.engine import SamplingParams
from proxy.cache_salt import CacheSalt
from proxy.generate import body_parts
from proxy.generate.fields import INT32, Name, Stops, Whole
from proxy.generate.unsupported import MESSAGES
from proxy.request_body import KVShareField, at_most

_NO_MEDIA = "this server reads no images, documents or other blocks"
_TOOL_USE_OF_CHOICE = {
    "auto": ToolUse.AUTO,
    "any": ToolUse.REQUIRED,
    "tool": ToolUse.REQUIRED,
    "none": ToolUse.NONE,
}
_Custom = body_parts.check_type("custom", default="custom", hint="this server runs no tools itself")


class TextBlock(body_parts.BodyPart):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(body_parts.BodyPart):
    """An assistant's thoughts, legible or not. They are dropped: templates show no earlier thoughts."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(body_parts.BodyPart):
    """An assistant's call of a tool."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


Text = Annotated[
    list[Annotated[TextBlock, BeforeValidator(body_parts.check_type("text", hint=_NO_MEDIA))]],
    Field(fail_fast=True),
    body_parts.text_as("text"),
]


class ToolResultBlock(body_parts.BodyPart):
    """A tool's answer."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text = Field(default_factory=list)
    is_error: bool = False

    @property
    def text(self) -> str:
        """Templates have no field for a failure, so that the text says it."""
        text = body_parts.joined(block.text for block in self.content)
        return f"Error: {text}" if self.is_error else text


UserBlock = Annotated[
    TextBlock | ToolResultBlock,
    Discriminator("type"),
    BeforeValidator(body_parts.check_type("text", "tool_result", hint=_NO_MEDIA)),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock,
    Discriminator("type"),
    BeforeValidator(
        body_parts.check_type("text", "tool_use", "thinking", "redacted_thinking", hint=_NO_MEDIA)
    ),
]


class UserMessage(body_parts.BodyPart):
    """Text and results of tools."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], Field(fail_fast=True), body_parts.text_as("text")]


class AssistantMessage(body_parts.BodyPart):
    """Text, thoughts and calls of tools."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], Field(fail_fast=True), body_parts.text_as("text")]


class SystemMessage(body_parts.BodyPart):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Text


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Discriminator("role")]


class MessagesTool(body_parts.BodyPart):
    """A tool that the client runs."""

    name: body_parts.ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


Tools = Annotated[list[Annotated[MessagesTool, BeforeValidator(_Custom)]], at_most(body_parts.MAX_TOOLS)]


class ToolChoiceObject(body_parts.BodyPart):
    """Says whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "expected a 'name' with type 'tool', and only with it")
        return self


class Thinking(body_parts.BodyPart):
    """Passed on to templates that know `enable_thinking`; the token budget and `display` are ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(body_parts.BodyPart):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(body_parts.BodyPart):
    """`effort` is for templates that know `reasoning_effort`."""

    format: JsonFormat | None = None
    effort: body_parts.Effort | None = None


class CountTokensBody(body_parts.BodyPart):
    """POST /v1/messages/count_tokens: a message body without what concerns the answer."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    system: Text = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoiceObject = ToolChoiceObject(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = None  # the older name of `output_config.format`

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises RequestError."""
        MESSAGES.refuse(self.model_extra or {})
        choice = self.tool_choice
        body_parts.check_tools(
            [tool.name for tool in self.tools], chosen=choice.name, required=choice.type in ("any", "tool")
        )
        return self

    @property
    def chat(self) -> Chat:
        """Raises RequestError for a tool's result without its call."""
        turns = body_parts.MessageTurns()
        if system := body_parts.joined(block.text for block in self.system):
            turns.add_text("system", system)
        for number, message in enumerate(self.messages):
            if isinstance(message, SystemMessage):
                turns.add_text("system", body_parts.joined(block.text for block in message.content))
                continue
            for index, block in enumerate(message.content):
                if isinstance(block, TextBlock):
                    turns.add_text(message.role, block.text)
                elif isinstance(block, ToolUseBlock):
                    turns.call(block.id, block.name, block.input)
                elif isinstance(block, ToolResultBlock):
                    at = f"messages[{number}].content[{index}].tool_use_id"
                    turns.result(block.tool_use_id, block.text, param=at)
        turns.check_complete(param="messages")
        answer_format = self.output_config.format or self.output_format
        template_kwargs: dict[str, Any] = {}  # templates ignore what they do not know
        if self.thinking is not None:
            template_kwargs["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config.effort is not None:
            template_kwargs["reasoning_effort"] = self.output_config.effort
        return Chat(
            messages=tuple(turns.messages),
            tools=tuple(
                body_parts.template_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict)
                for tool in self.tools
            ),
            tool_choice=ToolChoice(_TOOL_USE_OF_CHOICE[self.tool_choice.type], self.tool_choice.name),
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            answer_schema=None if answer_format is None else answer_format.schema_,
            continue_final_message=turns.messages[-1]["role"] == "assistant",
            template_kwargs=template_kwargs,
        )


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: body_parts.MaxTokens
    stop_sequences: Stops = Field(default_factory=list)
    temperature: body_parts.Temperature | None = None
    top_p: body_parts.TopP | None = None
    top_k: Annotated[Whole, Field(ge=0, le=INT32)] | None = None
    stream: bool = False
    kvshare: KVShareField = None
    cache_salt: CacheSalt = None

    @property
    def sampling(self) -> SamplingParams:
        given = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"})
        return SamplingParams(stop=tuple(self.stop_sequences), **given)
