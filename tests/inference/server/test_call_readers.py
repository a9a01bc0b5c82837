"""Calls read from a text: however it is cut, as they are written, in a time that grows with the text."""

import random
from itertools import pairwise

import pytest

from headstart.inference.server.errors import json_bytes
from headstart.inference.server.tools import call_readers
from headstart.inference.server.tools.call_readers import ListedCalls
from headstart.inference.server.tools.call_styles import STYLES

ARGUMENTS = '{"n": 3, "s": "</tool> <tool_call é\\n[TOOL_CALLS] ; {\\""}'
OBJECT = f'{{"name": "count", "arguments": {ARGUMENTS}}}'
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
LISTED = f"[TOOL_CALLS] [{OBJECT}]"
LLAMA = f'{{"name": "count", "parameters": {ARGUMENTS}}}'
# (style, text, content or None for all of it, number of calls)
TEXTS = [
    ("hermes", "plain < text <tool", "plain < text <tool", 0),
    ("hermes", CALL, "", 1),
    ("hermes", f"I count.\n\n{CALL}\n{CALL}\n", "I count.", 2),
    ("hermes", f"a {CALL} b {CALL}", "ab", 2),
    ("hermes", CALL.removesuffix("</tool_call>"), "", 1),
    ("hermes", 'x\n<tool_call>{"name": "unknown", "arguments": {}}</tool_call> y', None, 0),
    ("hermes", "<tool_call>[1]</tool_call>", None, 0),
    ("hermes", "<tool_call>{oh", None, 0),
    ("hermes", '<tool_call>{"name": ["count"]}</tool_call>' + CALL, '<tool_call>{"name": ["count"]}</tool_call>', 1),
    ("mistral", "plain [text] [TOOL", None, 0),
    ("mistral", LISTED, "", 1),
    ("mistral", f"[TOOL_CALLS][{OBJECT}, {OBJECT},\n{OBJECT}]", "", 3),
    ("mistral", f"I count. {LISTED}", "I count.", 1),
    ("mistral", f"[TOOL_CALLS]count{ARGUMENTS}", "", 1),
    (
        "mistral",
        f"Well.\n[TOOL_CALLS]count[ARGS]{ARGUMENTS}[TOOL_CALLS]count[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
        "Well.",
        2,
    ),
    ("mistral", f"[TOOL_CALLS]unknown{ARGUMENTS}", None, 0),
    ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}] y', None, 0),
    ("mistral", f"[TOOL_CALLS] {OBJECT}", "", 1),
    ("mistral", "[TOOL_CALLS] I do not call. " + 40 * "So it goes. ", None, 0),
    ("mistral", f"[TOOL_CALLS][{OBJECT}, ", "", 1),
    ("mistral", "[TOOL_CALLS]count[ARGS]{", None, 0),
    (
        "mistral",
        f'[TOOL_CALLS]no{{"a": "[TOOL_CALLS]count{{}}"}} b{LISTED}',
        '[TOOL_CALLS]no{"a": "[TOOL_CALLS]count{}"} b',
        1,
    ),
    ("mistral", f'[TOOL_CALLS][{OBJECT}, {{"name": "no"}} ] [b', '{"name": "no"} ] [b', 1),
    ("mistral", f"[TOOL_CALLS][]{OBJECT}", None, 0),
    ("mistral", f"[TOOL_CALLS][{OBJECT}]{OBJECT}", OBJECT, 1),
    ("mistral", f"[TOOL_CALLS]count[CALL_ID]{'a' * (256 - 14)}{ARGUMENTS}", "", 1),
    ("mistral", f"[TOOL_CALLS]count[CALL_ID]{'a' * (257 - 14)}{ARGUMENTS}", None, 0),
    ("mistral", "[TOOL_CALLS] [", None, 0),
    ("mistral", "[TOOL_CALLS]", None, 0),
    ("llama3_json", "plain { text", None, 0),
    ("llama3_json", LLAMA, "", 1),
    ("llama3_json", f"\n {OBJECT}; {LLAMA};{LLAMA}\n", "", 3),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", 1),
    ("llama3_json", "<|python_tag|>print(1)", None, 0),
    ("llama3_json", f"I count: {LLAMA}", None, 0),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', None, 0),
    ("llama3_json", f"{LLAMA} and so on", " and so on", 1),
    ("llama3_json", "{oh", None, 0),
    ("llama3_json", " ", None, 0),
    ("llama3_json", "<|python", None, 0),
]


def reader_of(style, parallel=True):
    return STYLES[style].reader({"count"}, parallel, STYLES[style].make_id)


@pytest.mark.parametrize(("style", "text", "content", "num_calls"), TEXTS, ids=lambda value: str(value)[:20])
def test_calls_are_read_however_the_text_is_cut(style, text, content, num_calls):
    dice = random.Random(0)
    for _ in range(50):
        cuts = sorted(dice.sample(range(1, len(text)), min(dice.randrange(0, 12), len(text) - 1)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        reader, said, calls = reader_of(style), "", []
        for i, part in enumerate(parts):
            more, found = reader.read(part, last=i == len(parts) - 1)
            said, calls = said + more, calls + found
        if not text.isspace() or said:
            assert said == (text if content is None else content), parts
        assert [call["function"] for call in calls] == [{"name": "count", "arguments": ARGUMENTS}] * num_calls
        assert [call["index"] for call in calls] == list(range(num_calls))


@pytest.mark.parametrize("style", STYLES)
def test_what_is_certain_is_told_before_the_text_ends(style):
    text = {"hermes": f"a {CALL}", "mistral": f"a {LISTED}", "llama3_json": LLAMA}[style]
    reader = reader_of(style)
    told = [reader.read(character, False) for character in text]
    assert sum(len(calls) for _, calls in told) == 1
    assert "".join(content for content, _ in told) == ("" if style == "llama3_json" else "a")
    reader = reader_of(style)
    assert "".join(reader.read(character, False)[0] for character in "no call at all") == "no call at all"


BRIEF = '{"name": "count"}'
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", BRIEF, '{"name": "no"}', " ", "\n", "text", "<tool", "{", "}"],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        *"],{ ",
        BRIEF,
        BRIEF + "]",
        '{"a": "\\""}',
        "count",
        "count[CALL_ID]abcde",
        "no[ARGS]",
    ],
    "llama3_json": ["<|python_tag|>", BRIEF, '{"name": "no"}', ";", " ", "\n", "text", "<|py", "{", "}"],
}


def read_all(style, parts):
    reader, said, calls = reader_of(style), "", []
    for part in parts:
        more, found = reader.read(part, False)
        said, calls = said + more, calls + found
    more, found = reader.read("", True)
    return said + more, [(call["index"], call["function"]) for call in calls + found]


@pytest.mark.parametrize("style", STYLES)
def test_where_the_text_is_cut_tells_nothing(style, monkeypatch):
    monkeypatch.setattr(call_readers, "MOST_NAME", 18)
    dice, marker = random.Random(0), FRAGMENTS[style][0]
    for _ in range(300):
        text = marker + "".join(dice.choices(FRAGMENTS[style], k=dice.randrange(1, 8)))
        said, calls = reader_of(style).read(text, True)
        whole = said, [(call["index"], call["function"]) for call in calls]
        cuts = [0, *sorted(dice.choices(range(len(text)), k=3)), len(text)]
        once = [(text[:i], text[i:]) for i in range(len(text) + 1)]
        for parts in (text, [text[a:b] for a, b in pairwise(cuts)], *once):
            assert read_all(style, parts) == whole, (text, parts)


FORMS = {
    "required": '[{"name": "count", "arguments": %s}]',
    "hermes": '<tool_call>{"arguments": %s, "name": "count"}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "count", "arguments": %s}]',
    "llama3_json": '{"name": "count", "parameters": %s }',
}
NAMED_FORM = "mistral", "[TOOL_CALLS]count%s"
DEEP = '{"a": ' * 1500 + "1" + "}" * 1500
WRITTEN = [
    '{"a":1.0e5,  "b":\n[ 1E2, -0.0 ]\n}',
    '{"a": 1e999}',
    f'{{"a": {"9" * 5000}}}',  # more digits than Python reads
    '{"a": "\\ud800é\\ud83d\\ude00"}',  # half of a pair, which UTF-8 cannot hold, and a whole one
    '{"a,:}": [":,{\\"", {"name": "no", "arguments": 1}, {}]}',
]


def read_form(style, form, arguments):
    reader = ListedCalls(lambda: "id") if style == "required" else reader_of(style)
    content, calls = reader.read(form % arguments, True)
    json_bytes(calls)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("arguments", WRITTEN, ids=lambda value: value[:20])
def test_arguments_are_told_as_they_are_written(arguments):
    for style, form in [*FORMS.items(), NAMED_FORM]:
        assert read_form(style, form, arguments) == ("", [("count", arguments)]), style


def test_arguments_in_a_string_are_told_without_its_quotes():
    for style, form in FORMS.items():
        assert read_form(style, form, '"{\\"n\\": 1}\\ud800"') == ("", [("count", '{"n": 1}?')]), style


def test_what_is_not_known_to_be_json_stays_text():
    """That arguments are JSON is read, down to some depth, but where a form makes sure of it."""
    for style, form in [*FORMS.items(), NAMED_FORM]:
        for arguments in (DEEP, '{"a": NaN}', '{"a": -Infinity}', '{"a": 01}'):
            if style != "required":
                assert read_form(style, form, arguments) == (form % arguments, []), style
    assert read_form("required", FORMS["required"], DEEP) == ("", [("count", DEEP)])


class Counted(str):
    """A text that counts its characters that are looked at or copied."""

    steps = 0

    def find(self, part, start=0, end=None):
        found = str.find(self, part, start, end)
        Counted.steps += (len(self[:end]) if found < 0 else found + len(part)) - start
        return found

    def __getitem__(self, place):
        part = Counted(str.__getitem__(self, place))
        Counted.steps += len(part)
        return part

    def __add__(self, other):
        return Counted(str.__add__(self, other))


def work_of(reader, parts):
    Counted.steps = 0
    for part in parts:
        reader._held = Counted(reader._held)
        reader.read(part, False)
    reader.read("", True)
    return Counted.steps


def test_a_long_text_is_searched_once():
    body = "x" * 1000
    for style, begun in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]count{"), ("llama3_json", "{")):
        assert work_of(reader_of(style), [begun, *[body] * 100]) < 400 * len(body), style


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>{"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("mistral", "[TOOL_CALLS]{"),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", "[TOOL_CALLS]a"),
        ("mistral", '[TOOL_CALLS]{"'),
        ("mistral", "[TOOL_CALLS]no{}"),
        ("mistral", f"[TOOL_CALLS][{LLAMA}, {{"),
    ],
)
def test_the_work_grows_with_the_text_and_no_faster(style, text):
    short, long = (work_of(reader_of(style), [text * count]) for count in (100, 400))
    assert long < 5 * short, (short, long)
