"""Tools of a conversation: what a request says of them, and the form of an answer that must call.

`tool_choice` auto: the text is the model's own, and calls stand in it as its template writes them (call_styles.py). `required`: the
text is a JSON list of {"name": ..., "arguments": {...}}; a named function: its arguments alone. Both are forms, so whatever comes
can be read. No torch.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .call_readers import ListedCalls, NamedCall
from .call_styles import STYLES

MOST_TOOLS = 128


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ToolFields(BaseModel):
    """Fields of a conversation about tools."""

    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tool_use(self):
        """ "none", "auto", "required" or "named"."""
        if not self.tools:
            return "none"
        return "named" if isinstance(self.tool_choice, NamedTool) else self.tool_choice or "auto"

    @property
    def tools_for_template(self):
        """The tools as plain values; None where the model is not told of any."""
        return None if self.tool_use == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def call_schema(self):
        """The JSON schema of a text that can only be calls, or None."""
        if self.tool_use == "named":
            name = self.tool_choice.function.name
            return _parameters(next(tool for tool in self.tools if tool.function.name == name))
        if self.tool_use != "required":
            return None
        calls = []
        for i, tool in enumerate(self.tools):
            arguments = _moved(_parameters(tool), f"#/items/anyOf/{i}/properties/arguments")
            properties = {"name": {"const": tool.function.name}, "arguments": arguments}
            calls.append(
                {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
            )
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}

    def check_tools(self, template, style):
        """ValueError for tools that do not fit together, or that the chat template does not know.  style: of its calls, or None"""
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > MOST_TOOLS:
            raise ValueError(f"tools holds {len(names)}; at most {MOST_TOOLS} per request")
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("tools must have names that differ")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r:.80}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice "required" needs tools')
        if self.tool_use != "none" and "tools" not in template:
            raise ValueError(
                "tools are not told to this model: its chat template does not render them; the server can be given one that does "
                "(--chat-template FILE)"
            )
        if self.tool_use == "auto" and style is None:
            raise ValueError(
                "tools can be called by this model with tool_choice required or a name only: its template writes calls in no way "
                f"that is read here ({', '.join(STYLES)})"
            )

    def reader(self, style):
        """A reader of one answer's text, or None where it is only text.  style: in which calls are written, one of STYLES"""
        make_id = STYLES[style].make_id if style else STYLES["hermes"].make_id
        if self.tool_use == "auto":
            names = {tool.function.name for tool in self.tools}
            return STYLES[style].reader(names, self.parallel_tool_calls is not False, make_id)
        if self.tool_use == "required":
            return ListedCalls(make_id)
        return NamedCall(self.tool_choice.function.name, make_id) if self.tool_use == "named" else None


def _parameters(tool):
    return tool.function.parameters or {"type": "object"}


def _moved(schema, place):
    """A schema whose references to itself hold where it stands in another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, place) for name, part in schema.items()}
    if isinstance(moved.get("$ref"), str) and moved["$ref"].startswith("#"):
        moved["$ref"] = place + moved["$ref"][1:]
    return moved


def messages_for_template(messages):
    """Messages whose calls have their arguments as values, as templates want them. ValueError unless they are JSON objects."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_values(call) for call in calls]}
            message["content"] = message.get("content") or ""
        found.append(message)
    return found


def _with_values(call):
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict) and isinstance(function["name"], str):
            return {**call, "function": {**function, "arguments": arguments}}
    except (TypeError, KeyError, ValueError, RecursionError):
        pass
    raise ValueError(
        f"messages holds a tool call without a function's name and its arguments as a JSON object: {call!r:.120}"
    )
