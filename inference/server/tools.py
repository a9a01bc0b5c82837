"""Tools of a conversation: what a request says of them, the form of an answer that must call, and calls read from growing text.

`tool_choice` auto: the text is the model's own, and calls stand in it as Hermes 2 Pro and Qwen write them:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>. `required`: the text is a JSON list of such objects; a named function: its
arguments alone. Both are forms, so whatever comes can be read. Text is searched from where the last search ended, without regular
expressions. No torch.
"""

import json
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MOST_TOOLS = 128
OPEN, CLOSE = "<tool_call>", "</tool_call>"


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

    def check_tools(self, template):
        """ValueError for tools that do not fit together, or that the chat template does not know."""
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
            raise ValueError("tools are not told to this model: its chat template does not know them")
        if self.tool_use == "auto" and OPEN not in template:
            raise ValueError(
                f"tools can be called by this model with tool_choice required or a name only: its template does not write {OPEN}"
            )

    def reader(self):
        """A reader of one answer's text, or None where it is only text."""
        if self.tool_use == "auto":
            return TaggedCalls({tool.function.name for tool in self.tools}, self.parallel_tool_calls is not False)
        if self.tool_use == "required":
            return ListedCalls()
        return NamedCall(self.tool_choice.function.name) if self.tool_use == "named" else None


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


# --- readers: read(text, last) -> (content, tool_calls of an event) of the text that is new; last: nothing follows ---


class _Reader:
    """ends_as: finish_reason of an answer that calls and ends by itself"""

    ends_as = "tool_calls"

    def __init__(self):
        self.num_calls = 0

    def _call(self, name, arguments):
        """What is told of a whole call."""
        self.num_calls += 1
        return call_delta(self.num_calls - 1, name, arguments)


class NamedCall(_Reader):
    """All text is the arguments of one function."""

    ends_as = "stop"  # as at OpenAI

    def __init__(self, name):
        super().__init__()
        self._name = name

    def read(self, text, last):
        if not self.num_calls:
            return "", [self._call(self._name, text)]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []


class ListedCalls(_Reader):
    """The text is a JSON list of calls; each is told when it is complete."""

    def __init__(self):
        super().__init__()
        self._held, self._next, self._depth, self._in_string = "", 0, 0, False

    def read(self, text, last):
        self._held += text
        calls, i = [], self._next
        while i < len(self._held):
            character = self._held[i]
            if self._in_string:
                if character == "\\":
                    i += 1
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "[{":
                self._depth += 1
                if self._depth == 2:
                    self._held, i = self._held[i:], 0
            elif character in "]}":
                self._depth -= 1
                if self._depth == 1:
                    call = json.loads(self._held[: i + 1])
                    calls.append(self._call(call["name"], _text(call["arguments"])))
            i += 1
        self._next = i
        return "", calls


class TaggedCalls(_Reader):
    """Text with calls between tags. What is no call of a known function stays text; white space beside calls is left out.

    parallel: whether calls after the first one are told; else they are left out, as in vLLM.
    """

    def __init__(self, names, parallel=True):
        super().__init__()
        self._parallel = parallel
        self._names, self._held, self._next, self._blank = names, "", 0, ""
        self._inside = self._after_call = False

    def read(self, text, last):
        self._held += text
        content, calls = [], []
        while True:
            if not self._inside:
                if self._after_call:
                    self._held = self._held.lstrip()
                    self._after_call = not self._held
                start = self._held.find(OPEN)
                if start < 0:
                    end = len(self._held) if last else self._safe()
                    content.append(self._held[:end])
                    self._held = self._held[end:]
                    break
                before = self._held[:start]
                content.append(before.rstrip())
                self._blank = before[len(content[-1]) :]
                self._held, self._next, self._inside = self._held[start + len(OPEN) :], 0, True
            end = self._held.find(CLOSE, self._next)
            if end < 0 and not last:
                self._next = max(len(self._held) - len(CLOSE) + 1, 0)
                break
            body, rest = (self._held, "") if end < 0 else (self._held[:end], self._held[end + len(CLOSE) :])
            call = self._read_call(body)
            if call is None:
                content.append(self._blank + OPEN + body + ("" if end < 0 else CLOSE))
            elif self._parallel or self.num_calls == 1:
                calls.append(call)
            self._held, self._inside, self._after_call = rest, False, call is not None
        return "".join(content), calls

    def _safe(self):
        """Length of the held text that is certainly no beginning of a call, nor white space before one."""
        begun = next((k for k in range(min(len(OPEN) - 1, len(self._held)), 0, -1) if self._held.endswith(OPEN[:k])), 0)
        return len(self._held[: len(self._held) - begun].rstrip())

    def _read_call(self, body):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        known = isinstance(name, str) and name in self._names
        return self._call(name, _text(arguments)) if known else None


def _text(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def call_delta(number, name, arguments):
    """A call in OpenAI's shape, as its first event."""
    function = {"name": name, "arguments": arguments}
    return {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
