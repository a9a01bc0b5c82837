"""Fields of a record beside roles and contents: reasoning_content, tools, tool_calls, weight.

They are kept for the chat template, or counted as left out. conversations.py reads records with it.
"""

import json
from collections import Counter

_REASONING = ("reasoning_content", "reasoning", "thinking")
_PLAIN = {"role", "content", "from", "value"}  # what most turns have
_NOT_RENDERED = ("function_call", "functions")  # OpenAI's older way to call tools


def count_fields(record: dict, turns: list, left_out: Counter) -> None:
    """Count in `left_out` the fields that are read for nothing."""
    for holder in (record, *turns):
        if isinstance(holder, dict):
            known = (*_REASONING, "tools", "tool_calls", "weight", *_NOT_RENDERED)
            left_out.update(name for name in known if holder.get(name) not in (None, "", []))


def kept_fields(turn: dict, role: str, left_out: Counter) -> dict:
    """The fields of a turn that belong to its message, in OpenAI's shape; `left_out` counts those of another shape.

    weight is kept where it is 0: that answer is not supervised.
    """
    if turn.keys() <= _PLAIN:
        return {}
    kept = {}
    left_out.update(name for name in _NOT_RENDERED if turn.get(name) not in (None, "", []))
    if role == "tool":
        kept |= {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    if role != "assistant":
        return kept
    reasoning = next((turn[name] for name in _REASONING if turn.get(name)), None)
    if isinstance(reasoning, str):
        kept["reasoning_content"] = reasoning
    elif reasoning is not None:
        left_out["reasoning_content"] += 1
    if turn.get("tool_calls"):
        calls = _tool_calls(turn["tool_calls"])
        if calls:
            kept["tool_calls"] = calls
        else:
            left_out["tool_calls"] += 1
    weight = turn.get("weight")
    if weight in (0, 1):
        kept |= {} if weight else {"weight": 0}
    elif weight is not None:
        left_out["weight other than 0 and 1"] += 1
    return kept


def kept_tools(record: dict, left_out: Counter) -> list[dict]:
    """The tools that a record offers to the assistant: a list, or the same as JSON text. Empty if there are none."""
    left_out.update(name for name in _NOT_RENDERED if record.get(name))
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools)
    if not tools and not record.get("tools"):
        return []
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools
    left_out["tools"] += 1
    return []


def split_tools(messages: list[dict]) -> tuple[list[dict], list[dict] | None]:
    """(messages as a chat template takes them, tools or None)."""
    ours = {"tools", "weight", "finish_reason"}
    if not any(ours & message.keys() for message in messages):
        return messages, None
    plain = [{name: value for name, value in message.items() if name not in ours} for message in messages]
    return plain, messages[0].get("tools")


def _tool_calls(calls) -> list[dict] | None:
    """Calls with their arguments as objects, which templates write as JSON; None for another shape."""
    if not isinstance(calls, list):
        return None
    kept = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            parsed = _parsed(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        names = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        call = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        kept.append({**names, "type": "function", "function": call})
    return kept


def _parsed(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
