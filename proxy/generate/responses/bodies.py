"""
The body of /v1/responses, checked: a pydantic model.

Parameters that this server does not implement are refused where ignoring them would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.engines.base import SamplingParams
from kvshare.errors import UnsupportedParameterError
from proxy.generate import part
from proxy.generate.responses.items import Input
from proxy.generate.turns import Turns
from proxy.generate.unsupported import refuse_unsupported
from proxy.request_body import at_most
from proxy.request_options import KVShareField
from proxy.wrong_values import invalid

_LOGPROBS = "message.output_text.logprobs"
_Function = part.of_types("function", hint="this server runs no tools itself")


class Tool(part.Part):
    """A function that the client runs, in the flat shape of this API."""

    type: Literal["function"]
    name: part.ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """In the shape of chat completions."""
        return part.template_tool(self.name, self.description, self.parameters, strict=self.strict)


Tools = Annotated[list[Annotated[Tool, BeforeValidator(_Function)]], at_most(part.MAX_TOOLS)]


class NamedTool(part.Part):
    """The only function that may be called."""

    type: Literal["function"]
    name: str


class AllowedTools(part.Part):
    """Some of the tools; the others are as if they were not there."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedTool, BeforeValidator(_Function)]], Field(min_length=1)]

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class PlainFormat(part.Part):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(part.Part):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TextConfig(part.Part):
    """What the text of the answer is like. `verbosity` is a hint, and ignored."""

    format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] = PlainFormat(type="text")

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        if isinstance(self.format, SchemaFormat):
            return self.format.schema_
        return {"type": "object"} if self.format.type == "json_object" else None


class Reasoning(part.Part):
    """`effort` is for templates that know `reasoning_effort`; summaries are not written."""

    effort: part.Effort | None = None


class ResponsesBody(part.Part):
    """POST /v1/responses"""

    model: part.Model
    input: Input
    instructions: str | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: part.MaxTokens | None = None
    temperature: part.Temperature | None = None
    top_p: part.TopP | None = None
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"  # either way what does not fit is refused
    stream: bool = False
    kvshare: KVShareField = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises RequestError."""
        refuse_unsupported("responses", self.model_extra or {})
        if _LOGPROBS in self.include:
            problem = f"'{_LOGPROBS}': not implemented for responses; use /v1/chat/completions"
            raise UnsupportedParameterError("include", problem)
        names = [tool.name for tool in self.tools]
        choice = self._tool_choice
        part.check_tools(names, chosen=choice.name, required=choice.use is ToolUse.REQUIRED)
        if isinstance(self.tool_choice, AllowedTools) and not self.tool_choice.names <= set(names):
            raise invalid("tool_choice.tools", "expected names of 'tools' only, got another")
        return self

    @property
    def chat(self) -> Chat:
        """Raises RequestError for a call's output without the call."""
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        for number, item in enumerate(self.input):
            item.add_to(turns, at=f"input[{number}]")
        turns.check_complete(param="input")
        return Chat(
            messages=turns.messages,
            tools=tuple(tool.for_template() for tool in self._callable_tools),
            tool_choice=self._tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            answer_schema=self.text.answer_schema,
            template_kwargs=self._template_kwargs,
        )

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )

    @property
    def echo(self) -> dict[str, Any]:
        """What a response object says of the request that it answers."""
        given = self.model_dump(mode="json", by_alias=True, include=_ECHOED)
        extra = self.model_extra or {}
        return {
            **given,
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
    def _callable_tools(self) -> list[Tool]:
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools if tool.name in self.tool_choice.names]
        return self.tools

    @property
    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice(ToolUse.REQUIRED, self.tool_choice.name)
        if isinstance(self.tool_choice, AllowedTools):
            return ToolChoice(ToolUse(self.tool_choice.mode))
        return ToolChoice(ToolUse(self.tool_choice))

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        """Templates ignore what they do not know; some know an effort, some only whether to think."""
        effort = self.reasoning.effort
        return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


_ECHOED = {
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "max_output_tokens",
    "temperature",
    "top_p",
}
