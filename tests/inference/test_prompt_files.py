"""Prompts from JSONL files are what training renders before an answer, the record's tools among it."""

import json

import pytest

from headstart.inference.prompt_files import in_turn, read_prompts, render_prompt
from headstart.tests.train.data.chat_templates import STYLES, byte_tokenizer
from headstart.train.data.answer_spans import render
from headstart.train.data.conversations import write_conversations

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
NOON = {"role": "tool", "name": "clock", "content": "12:00"}
ASKED = {"role": "user", "content": "Time?", "tools": [TOOL]}
ANSWER = {"role": "assistant", "content": "Noon."}
CONVERSATIONS = [
    [{**ASKED, "set": "a"}, ANSWER],
    [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, NOON, ANSWER],
    [{"role": "user", "content": "One?"}, ANSWER],
]


@pytest.mark.parametrize("style", ["Qwen2.5", "Qwen3-Thinking", "Mistral v0.3", "Harmony"])
def test_held_out_conversations_are_rendered_as_training_does(tmp_path, style):
    tokenizer = byte_tokenizer(STYLES[style].template, STYLES[style].special)
    write_conversations(tmp_path / "heldout.jsonl", CONVERSATIONS)
    prompts = in_turn(read_prompts(tmp_path / "heldout.jsonl"))
    assert len(prompts) == 3
    for prompt, messages in zip(prompts, CONVERSATIONS):
        asked = messages[:-1]
        text = render(tokenizer, asked, prompt=True)
        assert render_prompt(tokenizer, prompt)["prompt"] == text
        assert ("clock" in text) == ("tools" in asked[0])


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), None, "", []])
def test_tools_are_a_list_or_its_json_text(tmp_path, tools):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Time?"}], "tools": tools}))
    assert read_prompts(path)[0].get("tools") == ([TOOL] if tools else None)


@pytest.mark.parametrize("tools", ["clock", ["clock"], {"name": "clock"}, 3, '{"name": "clock"}'])
def test_tools_of_another_shape_are_named(tmp_path, tools):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Time?"}], "tools": tools}))
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1: tools must be a list of objects, or its JSON text"):
        read_prompts(path)
