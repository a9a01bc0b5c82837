"""Readers of tool calls in a text that grows: read(text, last) -> (content, tool_calls of an event) of the text that is new.

Text is searched from where the last search ended, without regular expressions. What is no call of a known function stays text.
last: nothing follows. No torch.
"""

import json

PYTHON_TAG = "<|python_tag|>"
MOST_NAME = 256  # characters of a name and an id before arguments


class Reader:
    """make_id: a function that makes the id of a call; ends_as: finish_reason of an answer that calls and ends by itself"""

    ends_as = "tool_calls"

    def __init__(self, make_id):
        self.num_calls, self._make_id = 0, make_id

    def _call(self, name, arguments):
        """A whole call in OpenAI's shape, as its first event."""
        self.num_calls += 1
        function = {"name": name, "arguments": arguments}
        return {"index": self.num_calls - 1, "id": self._make_id(), "type": "function", "function": function}


class NamedCall(Reader):
    """All text is the arguments of one function."""

    ends_as = "stop"  # as at OpenAI

    def __init__(self, name, make_id):
        super().__init__(make_id)
        self._name = name

    def read(self, text, last):
        if not self.num_calls:
            return "", [self._call(self._name, text)]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []


class ListedCalls(Reader):
    """The text is a JSON list of calls; each is told when it is complete."""

    def __init__(self, make_id):
        super().__init__(make_id)
        self._held, self._scan = "", None

    def read(self, text, last):
        self._held += text
        calls = []
        while True:
            if self._scan is None:
                start = self._held.find("{")
                if start < 0:
                    self._held = ""
                    break
                self._held, self._scan = self._held[start:], JsonScan()
            end = self._scan.end(self._held)
            if end is None:
                break
            call = json.loads(self._held[:end])
            calls.append(self._call(call["name"], _text(call["arguments"])))
            self._held, self._scan = self._held[end:], None
        return "", calls


class FreeCalls(Reader):
    """Calls in a text of the model's own.  names: of the known functions; parallel: whether calls after the first one are told

    Those that are not told are left out, as in vLLM.
    """

    def __init__(self, names, parallel, make_id):
        super().__init__(make_id)
        self._names, self._parallel, self._held = names, parallel, ""

    def _calls_of(self, body, name=None):
        """The call that a JSON text is, in a list; none if it is not told; None if it is no call.

        name: of the function whose arguments it is, None: the object names it
        """
        try:
            arguments = json.loads(body)
            if name is None:
                name = arguments["name"]
                arguments = arguments.get("arguments", arguments.get("parameters", {}))
            arguments = _text(arguments, allow_nan=False)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names:
            return None
        call = self._call(name, arguments)
        return [call] if self._parallel or self.num_calls == 1 else []


class OpenedCalls(FreeCalls):
    """Calls after an opening marker. White space beside calls is left out.

    Subclasses: `opening`, and `_body(last)`: what stands at the start of the held text, after the marker.
    -> (calls that are complete now, length of the text they and earlier ones take, or None while it goes on; whether it was calls)
    """

    opening = None

    def __init__(self, names, parallel, make_id):
        super().__init__(names, parallel, make_id)
        self._blank, self._inside, self._after_call = "", False, False

    def read(self, text, last):
        self._held += text
        content, calls = [], []
        while True:
            if not self._inside:
                if self._after_call:
                    self._held = self._held.lstrip()
                    self._after_call = not self._held
                start = self._held.find(self.opening)
                if start < 0:
                    end = len(self._held) if last else self._safe()
                    content.append(self._held[:end])
                    self._held = self._held[end:]
                    break
                before = self._held[:start]
                content.append(before.rstrip())
                self._blank = before[len(content[-1]) :]
                self._held, self._inside = self._held[start + len(self.opening) :], True
                self._begin()
            found, length, is_call = self._body(last)
            calls += found
            if length is None:
                break
            if not is_call:
                content.append(self._blank + self.opening + self._held[:length])
            self._held, self._inside, self._after_call = self._held[length:], False, is_call
        return "".join(content), calls

    def _safe(self):
        """Length of the held text that is certainly no beginning of a call, nor white space before one."""
        most = min(len(self.opening) - 1, len(self._held))
        begun = next((k for k in range(most, 0, -1) if self._held.endswith(self.opening[:k])), 0)
        return len(self._held[: len(self._held) - begun].rstrip())


class HermesCalls(OpenedCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro and Qwen write it."""

    opening, closing = "<tool_call>", "</tool_call>"

    def _begin(self):
        self._next = 0

    def _body(self, last):
        end = self._held.find(self.closing, self._next)
        if end < 0 and not last:
            self._next = max(len(self._held) - len(self.closing) + 1, 0)
            return [], None, False
        body, length = (self._held, len(self._held)) if end < 0 else (self._held[:end], end + len(self.closing))
        found = self._calls_of(body)
        return found or [], length, found is not None


class MistralCalls(OpenedCalls):
    """[TOOL_CALLS] and a JSON list of calls, or a name, [CALL_ID] and an id, or [ARGS], or neither, and the arguments.

    The second is how versions since the tokenizer of November 2024 write it, a marker for each call.
    """

    opening = "[TOOL_CALLS]"

    def _begin(self):
        self._next, self._name, self._scan, self._in_list, self._num_before = 0, None, None, None, self.num_calls

    def _body(self, last):
        calls = []
        while True:
            if self._scan is None and not self._find_object():
                goes_on = self._next == len(self._held) and not last
                return calls, None if goes_on else self._next, self.num_calls > self._num_before
            object_text = self._held[self._next :]
            end = self._scan.end(object_text)
            if end is None and not last:
                return calls, None, True
            found = self._calls_of(object_text[:end], self._name) if end is not None else None
            if found is None:
                return calls, self._next, self.num_calls > self._num_before
            calls += found
            self._next, self._scan = self._next + end, None
            if not self._in_list:
                return calls, self._next, True

    def _find_object(self):
        """Look for the next object from `_next` on, which moves on to it, to the end of the held text if that may be before one."""
        text, i = self._held, self._next
        if self._in_list is None:
            begun = text.lstrip()
            if not begun:
                self._next = len(text)
                return False
            self._in_list = begun[0] in "[{"  # a name does not begin so
            i = len(text) - len(begun) + (begun[0] == "[") if self._in_list else 0
        if not self._in_list:
            i = text.find("{", self._next)
            self._next = len(text) if i < 0 else i
            self._name = text[: self._next].partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
            if i < 0 and len(text) > MOST_NAME:
                self._next = 0  # no call
                return False
        while self._in_list and i < len(text) and (text[i].isspace() or text[i] == ","):
            i += 1
        if self._in_list:
            self._next = i
            if i < len(text) and text[i] == "]":
                self._next = i + 1
                return False
        if self._next < len(text) and text[self._next] == "{":
            self._scan = JsonScan()
        return self._scan is not None


class LlamaCalls(FreeCalls):
    """{"name": ..., "parameters": {...}} and nothing else but a tag before and semicolons between, as Llama 3 writes it."""

    def __init__(self, names, parallel, make_id):
        super().__init__(names, parallel, make_id)
        self._before, self._scan, self._is_text = "", None, False

    def read(self, text, last):
        self._held += text
        calls = []
        while not self._is_text:
            if self._scan is None:
                start = self._object_start(last)
                if start is None:
                    break
                self._before, self._held, self._scan = self._held[:start], self._held[start:], JsonScan()
            end = self._scan.end(self._held)
            if end is None and not last:
                break
            found = self._calls_of(self._held[:end]) if end is not None else None
            self._is_text = found is None
            if found is not None:
                calls += found
                self._before, self._held, self._scan = "", self._held[end:], None
        if not self._is_text:
            return "", calls
        content, self._before, self._held = self._before + self._held, "", ""
        return content, calls

    def _object_start(self, last):
        """Where the next object begins; None if nothing tells yet, or if the rest is text, which is noted."""
        begun = self._held.lstrip(" \t\r\n;" if self.num_calls else None)
        if not self.num_calls:
            if begun.startswith(PYTHON_TAG):
                begun = begun.removeprefix(PYTHON_TAG).lstrip()
            elif begun and PYTHON_TAG.startswith(begun) and not last:
                return None
        if begun.startswith("{"):
            return len(self._held) - len(begun)
        self._is_text = bool(begun) or (last and not self.num_calls)
        return None


class JsonScan:
    """Finds where a JSON object ends in a text that grows; the text begins with it."""

    def __init__(self):
        self._next, self._depth, self._in_string = 0, 0, False

    def end(self, text):
        """Index after the object, None while it goes on."""
        i = self._next
        while i < len(text):
            character = text[i]
            if self._in_string:
                if character == "\\":
                    i += 1
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return i + 1
            i += 1
        self._next = i
        return None


def _text(arguments, allow_nan=True):
    """The arguments of a call as text, which UTF-8 can hold. ValueError for numbers that JSON has not, if they are not allowed."""
    if isinstance(arguments, str):
        return arguments.encode("utf-8", "replace").decode()
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=allow_nan)
    return text if _is_utf8(text) else json.dumps(arguments)


def _is_utf8(text):
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, which JSON can write by its number
        return False
    return True
