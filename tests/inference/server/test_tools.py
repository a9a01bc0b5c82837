"""Tools: calls that a form makes sure of, over a real socket; the ways to write calls; what is refused."""

import json

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from headstart import LLM
from headstart.inference.server.chat import ChatAnswer
from headstart.inference.server.driver.growing_output import Delta
from headstart.inference.server.fields import ChatFields
from headstart.inference.server.tools.call_styles import STYLES, style_of
from headstart.tests.inference.server.serving import HEADS, NAME, PROMPTS, TARGET, running

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% if tools %}<|user|>Tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODE = {
    "$defs": {"mode": {"enum": ["r", "w"]}},
    "type": "object",
    "properties": {"mode": {"$ref": "#/$defs/mode"}},
    "required": ["mode"],
    "additionalProperties": False,
}
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "open_file", "parameters": MODE}},
    {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": NUMBER}},
]
MESSAGES = [{"role": "user", "content": PROMPTS[0]}]
SAMPLED = dict(model=NAME, messages=MESSAGES, tools=TOOLS, temperature=1.0, max_tokens=300)


@pytest.fixture(scope="module")
def served(plain_llm):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = TEMPLATE
    config = {"model": str(HEADS), "tree": "static"}
    with running(LLM(plain_llm, tokenizer=tokenizer, speculative_config=config)) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def check_call(name, arguments):
    arguments = json.loads(arguments)
    if name == "open_file":
        assert set(arguments) == {"mode"}
        assert arguments["mode"] in ("r", "w")
    else:
        assert name == "count"
        assert set(arguments) == {"n"}
        assert 0 <= arguments["n"] <= 99


def gathered(events):
    """(content, [(name, arguments)], finish_reason) of a stream."""
    content, calls, reason = "", {}, None
    for event in events:
        choice = event.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls)
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, [tuple(call) for call in calls.values()], reason


def test_a_required_call_can_be_read_whole_and_streamed(client):
    for several in (True, False):
        given = SAMPLED | dict(tool_choice="required", parallel_tool_calls=several, seed=1, max_tokens=100)
        choice = client.chat.completions.create(**given).choices[0]
        # A model as small as this one may go on calling until it is cut; what is complete then is told.
        reason = choice.finish_reason
        assert reason == "tool_calls" or (several and reason == "length")
        assert choice.message.content is None
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for call in calls:
            check_call(*call)
        assert len(calls) > 1 if several else len(calls) == 1
        assert gathered(client.chat.completions.create(stream=True, **given)) == ("", calls, reason)


def test_a_named_function_is_called(client):
    given = SAMPLED | dict(tool_choice={"type": "function", "function": {"name": "open_file"}}, seed=1)
    choice = client.chat.completions.create(**given).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("open_file", "stop")
    assert '": ' not in call.function.arguments  # no blanks, with which a weak model fills its answer
    check_call(call.function.name, call.function.arguments)
    expected = "", [("open_file", call.function.arguments)], "stop"
    assert gathered(client.chat.completions.create(stream=True, **given)) == expected
    # The answer, and the tool's, go back into the conversation.
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), told]
    again = client.chat.completions.create(**SAMPLED | dict(messages=messages, tool_choice="none", max_tokens=4))
    assert again.choices[0].message.content


def test_of_its_own_accord_the_model_writes_text(client):
    given = SAMPLED | dict(seed=3, max_tokens=20)
    texts = [client.chat.completions.create(**given | more).choices[0] for more in ({}, {"tool_choice": "auto"})]
    assert texts[0].message.content == texts[1].message.content
    assert texts[0].message.tool_calls is None
    content, calls, reason = gathered(client.chat.completions.create(stream=True, **given))
    assert (content, calls, reason) == (texts[0].message.content, [], texts[0].finish_reason)
    without = client.chat.completions.create(**given | {"tool_choice": "none"}).choices[0].message.content
    assert without != texts[0].message.content, "the template tells the model of its tools"


ARGUMENTS = '{"n": 3}'
CALL = f'<tool_call>\n{{"name": "count", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_that_templates_take_back(style):
    first, second = STYLES[style].make_id(), STYLES[style].make_id()
    assert first != second
    assert (len(first) == 9 and first.isalnum()) if style == "mistral" else first.startswith("call_")


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (TEMPLATE, "hermes"),
        ("{{- '[TOOL_CALLS]' + message['tool_calls'] | tojson }}", "mistral"),
        ("{{- 'Environment: ipython\n' }}", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_style(template, style):
    assert style_of(template) == style


def test_one_call_is_told_where_one_was_asked_for():
    asked = dict(messages=MESSAGES, tools=TOOLS)
    for given, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        reader, calls = ChatFields(**asked | given).reader("hermes"), []
        for part, last in ((f"a {CALL}{CALL[:30]}", False), (f"{CALL[30:]} b", True)):
            calls += reader.read(part, last)[1]
        assert [call["index"] for call in calls] == list(range(count))


def test_a_call_in_a_models_own_text_ends_as_tool_calls(served):
    """The engine cannot be made to write one, so the answer's own parts are given what it would have written."""
    fields = ChatFields(**SAMPLED)
    prompts = served.service.asker.chat_prompts(fields)
    delta = Delta(0, 0, f"Well. {CALL}", [1], finish_reason="stop")
    choice = ChatAnswer(served.service, fields, prompts, "one").choice(delta)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "count", "arguments": ARGUMENTS}
    cut, _ = ChatAnswer(served.service, fields, prompts, "two").chunk(Delta(0, 0, CALL, [1], finish_reason="length"))
    assert (cut["finish_reason"], len(cut["delta"]["tool_calls"])) == ("length", 1)


def test_mistrals_marker_is_a_special_token_that_is_shown(served, monkeypatch):
    asker, shown = served.service.asker, {}
    for style in STYLES:
        monkeypatch.setattr(asker, "call_style", style)
        for choice in ("auto", "none"):
            (prompt,) = asker.chat_prompts(ChatFields(**SAMPLED | {"tool_choice": choice}))
            shown[style, choice] = not prompt.params.skip_special_tokens
    assert [key for key, value in shown.items() if value] == [("mistral", "auto")]


NAMED = {"type": "function", "function": {"name": "close"}}
BAD = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "function.name"),
    ({"tools": TOOLS * 2}, "tools", "names that differ"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "at most 128"),
    ({"tool_choice": NAMED}, "tool_choice", "not among the tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "sometimes"}, None, ""),
    ({"response_format": {"type": "json_object"}}, "response_format", "beside tools"),
    ({"structured_outputs": {"regex": "a"}, "tool_choice": "required"}, "structured_outputs", "beside tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], "tool_choice": "required"},
        "tools",
        "Invalid type",
    ),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages",
        "as a JSON object",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: str(case[0])[:60])
def test_bad_tools_are_refused(served, case):
    given, param, words = case
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=SAMPLED | given, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert param is None or error["param"] == param, error
    assert words in error["message"]
