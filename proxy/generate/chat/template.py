"""What of a body decides how messages become a prompt: read, and made a `Chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kvshare.conversation.chat import Chat
from proxy.generate.chat.messages import chat_messages
from proxy.generate.chat.tools import Functions, Tools, read_tools
from proxy.generate.fields import Body
from proxy.wrong_values import invalid


class TemplateBody(Body):
    """The messages, the tools, and what the template is given beside them."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: Tools | None = None
    tool_choice: Any = None
    functions: Functions | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_continued(self) -> Self:
        """Raises RequestError."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid(
                    "add_generation_prompt", "expected false with 'continue_final_message', got true"
                )
            if self.messages[-1].get("role") != "assistant":
                raise invalid("continue_final_message", "expected an assistant's message as the last one")
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """None: any text."""
        return None

    @property
    def chat(self) -> Chat:
        """Raises RequestError naming the field."""
        asked = read_tools(self.tools, self.tool_choice, self.functions, self.function_call)
        return Chat(
            messages=chat_messages(self.messages),
            tools=asked.tools,
            tool_choice=asked.choice,
            # The older API has room for one call.
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.functions,
            answer_schema=self.answer_schema,
            continue_final_message=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_kwargs=self._template_kwargs(),
        )

    def _template_kwargs(self) -> dict[str, Any]:
        """As vLLM's chat route gives them: an effort also switches thinking on or off."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("enable_thinking", self.reasoning_effort != "none")
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs
