"""Readers of tool calls in a text that grows: read(text, last) -> (content, tool_calls of an event) of the text that is new.

Text is searched from where the last search ended, without regular expressions. What is found does not depend on where it is cut.
Arguments are told as they are written. What is no call of a known function stays text. last: nothing follows. No torch.
"""

import json
from itertools import pairwise

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
            call = _call_in(self._held[:end])
            calls += [self._call(*call)] if call else []
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
            STRICT_JSON.decode(body)
        except (ValueError, RecursionError):
            return None
        name, arguments = (name, body) if name is not None else _call_in(body.strip()) or (None, None)
        if not isinstance(name, str) or name not in self._names:
            return None
        call = self._call(name, arguments)
        return [call] if self._parallel or self.num_calls == 1 else []


class OpenedCalls(FreeCalls):
    """Calls after an opening marker. White space beside calls is left out.

    Subclasses: `opening`, and `_body(last)`: what stands in the held text from `_at` on, after the marker.
    -> (calls that are complete now, where they and earlier ones end (`_at`: there are none), where text after them ends (None: the
    body goes on))
    """

    opening = None

    def __init__(self, names, parallel, make_id):
        super().__init__(names, parallel, make_id)
        self._at, self._blank, self._inside, self._after_call = 0, "", False, False

    def read(self, text, last):
        self._held += text
        content, calls = [], []
        while True:
            if not self._inside:
                if self._after_call:
                    self._at = _past_blanks(self._held, self._at)
                    self._after_call = self._at == len(self._held)
                start = self._held.find(self.opening, self._at)
                if start < 0:
                    rest = self._held[self._at :]
                    end = len(rest) if last else self._safe(rest)
                    content.append(rest[:end])
                    self._held, self._at = rest[end:], 0
                    break
                before = self._held[self._at : start]
                content.append(before.rstrip())
                self._blank = before[len(content[-1]) :]
                self._at, self._inside = start + len(self.opening), True
                self._begin()
            found, told, end = self._body(last)
            calls += found
            if end is None:
                break
            if told == self._at:
                content.append(self._blank + self.opening)
            content.append(self._held[told:end])
            self._at, self._inside, self._after_call = end, False, self._at < told == end
        return "".join(content), calls

    def _safe(self, text):
        """Length of a text that is certainly no beginning of a call, nor white space before one."""
        most = min(len(self.opening) - 1, len(text))
        begun = next((k for k in range(most, 0, -1) if text.endswith(self.opening[:k])), 0)
        return len(text[: len(text) - begun].rstrip())


class HermesCalls(OpenedCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro and Qwen write it."""

    opening, closing = "<tool_call>", "</tool_call>"

    def _begin(self):
        self._next = self._at

    def _body(self, last):
        end = self._held.find(self.closing, self._next)
        if end < 0 and not last:
            self._next = max(len(self._held) - len(self.closing) + 1, self._at)
            return [], self._at, None
        body = self._held[self._at : end] if end >= 0 else self._held[self._at :]
        end = end + len(self.closing) if end >= 0 else len(self._held)
        found = self._calls_of(body)
        return found or [], self._at if found is None else end, end


class MistralCalls(OpenedCalls):
    """[TOOL_CALLS] and a JSON list of calls, or a name, [CALL_ID] and an id, or [ARGS], or neither, and the arguments.

    The second is how versions since the tokenizer of November 2024 write it, a marker for each call. An object that is no call is
    text to its end, with all markers inside it.
    """

    opening = "[TOOL_CALLS]"

    def _begin(self):
        self._next, self._name, self._scan, self._in_list, self._closed = self._at, None, None, None, False
        self._num_before = self.num_calls

    def _body(self, last):
        calls = []
        while self._scan is not None or self._find_object():
            end = self._scan.end(self._held)
            if end is None and not last:
                return calls, self._at, None
            found = self._calls_of(self._held[self._next : end], self._name) if end is not None else None
            if found is None:
                return calls, self._told(), len(self._held) if end is None else end
            calls += found
            self._next, self._scan = end, None
            if not self._in_list:
                return calls, end, end
        goes_on = self._next == len(self._held) and not self._closed and not last
        return calls, self._told(), None if goes_on else self._next

    def _told(self):
        return self._next if self.num_calls > self._num_before else self._at

    def _find_object(self):
        """Whether an object begins at `_next`, which moves on to it, or to the end of the held text if that may be before one."""
        text = self._held
        if self._in_list is None:
            self._next = _past_blanks(text, self._next)
            if self._next == len(text):
                return False
            self._in_list = text[self._next] in "[{"  # a name does not begin so
            self._next += text[self._next] == "["
        if self._in_list:
            self._next = _past_blanks(text, self._next, ",")
            self._closed = text[self._next : self._next + 1] == "]"
            self._next += self._closed
        else:
            most = self._at + MOST_NAME
            start = text.find("{", self._next, most + 1)
            self._name = text[self._at : max(start, self._at)].partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
            self._next = start if start >= 0 else len(text) if len(text) <= most else self._at  # the last: no call
        if not self._closed and text[self._next : self._next + 1] == "{":
            self._scan = JsonScan(self._next)
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
    """Finds where a JSON object ends in a text that grows; the object begins at `start`.

    marks: where the colons and commas between its own members are
    """

    def __init__(self, start=0):
        self._next, self._depth, self._in_string, self.marks = start, 0, False, []

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
            elif character in ":," and self._depth == 1:
                self.marks.append(i)
            i += 1
        self._next = i
        return None


def _refuse(constant):
    raise ValueError(f"JSON has no {constant}")


# Numbers are not worked out: Python would refuse those of many digits, and make an infinity of 1e999.
STRICT_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def _call_in(text):
    """(name, arguments as text) of the call that a JSON object is; None if it is none. Its arguments can be nested however deep."""
    try:
        members = _members(text)
        name, arguments = json.loads(members["name"]), members.get("arguments", members.get("parameters", "{}"))
        if arguments.startswith('"'):  # UTF-8 cannot hold half of a pair, which JSON can write by its number
            arguments = json.loads(arguments).encode("utf-8", "replace").decode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return name, arguments


def _members(text):
    """The members of a JSON object by name, each as it is written. ValueError for what is no object, or an empty one."""
    scan = JsonScan()
    end = scan.end(text) if text.startswith("{") else None
    if end is None:
        raise ValueError(f"no JSON object: {text!r:.80}")
    parts = [text[a + 1 : b].strip() for a, b in pairwise([0, *scan.marks, end - 1])]
    return {json.loads(name): value for name, value in zip(parts[::2], parts[1::2], strict=True)}


def _past_blanks(text, i, other=""):
    """The first index from i on that is neither white space nor another character that is given."""
    while i < len(text) and (text[i].isspace() or text[i] in other):
        i += 1
    return i
