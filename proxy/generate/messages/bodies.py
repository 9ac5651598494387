"""
The bodies of /v1/messages and /v1/messages/count_tokens, checked: pydantic models.

Parameters that this server does not implement are refused where ignoring them would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.engines.base import SamplingParams
from proxy.generate import part
from proxy.generate.fields import INT32, Stops, Whole
from proxy.generate.messages.content import Message, Text
from proxy.generate.turns import Turns
from proxy.generate.unsupported import refuse_unsupported
from proxy.request_body import at_most
from proxy.request_options import KVShareField

_USES = {"auto": ToolUse.AUTO, "any": ToolUse.REQUIRED, "tool": ToolUse.REQUIRED, "none": ToolUse.NONE}
_Custom = part.of_types("custom", default="custom", hint="this server runs no tools itself")


class Tool(part.Part):
    """A tool that the client runs."""

    name: part.ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """In OpenAI's words."""
        return part.template_tool(self.name, self.description, self.input_schema, strict=self.strict)


Tools = Annotated[list[Annotated[Tool, BeforeValidator(_Custom)]], at_most(part.MAX_TOOLS)]


class ToolChoiceObject(part.Part):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "expected a 'name' with type 'tool', and only with it")
        return self


class Thinking(part.Part):
    """Passed on to templates that know `enable_thinking`; the budget and the display are not."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(part.Part):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(part.Part):
    """`effort` is for templates that know `reasoning_effort`."""

    format: JsonFormat | None = None
    effort: part.Effort | None = None


class CountTokensBody(part.Part):
    """POST /v1/messages/count_tokens: a message body without what concerns the answer."""

    model: part.Model
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
        refuse_unsupported("messages", self.model_extra or {})
        choice = self.tool_choice
        part.check_tools(
            [tool.name for tool in self.tools], chosen=choice.name, required=choice.type in ("any", "tool")
        )
        return self

    @property
    def chat(self) -> Chat:
        """Raises RequestError for a tool's result without its call."""
        turns = Turns()
        if system := part.joined(self.system):
            turns.say("system", system)
        for number, message in enumerate(self.messages):
            message.add_to(turns, at=f"messages[{number}]")
        turns.check_complete(param="messages")
        answer_format = self.output_config.format or self.output_format
        return Chat(
            messages=turns.messages,
            tools=tuple(tool.for_template() for tool in self.tools),
            tool_choice=ToolChoice(_USES[self.tool_choice.type], self.tool_choice.name),
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            answer_schema=None if answer_format is None else answer_format.schema_,
            continue_final_message=turns.messages[-1]["role"] == "assistant",
            template_kwargs=self._template_kwargs,
        )

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        """Templates ignore what they do not know."""
        given: dict[str, Any] = {}
        if self.thinking is not None:
            given["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config.effort is not None:
            given["reasoning_effort"] = self.output_config.effort
        return given


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: part.MaxTokens
    stop_sequences: Stops = Field(default_factory=list)
    temperature: part.Temperature | None = None
    top_p: part.TopP | None = None
    top_k: Annotated[Whole, Field(ge=0, le=INT32)] | None = None
    stream: bool = False
    kvshare: KVShareField = None

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences),
        )
