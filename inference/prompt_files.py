"""Prompts from JSONL files: lines {"messages": [...]}, {"prompt": "..."} or {"prompt_token_ids": [...]}."""

import json
from pathlib import Path


def read_prompts(path, start=0, count=None):
    """The prompts of lines start .. start + count of a JSONL file, as `render_prompt` takes them.

    The answer that a conversation ends with is left out. ValueError names file and line of what cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"no prompt file {path}; expected JSONL with 'messages', 'prompt' or 'prompt_token_ids' in each line"
        )
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            prompts.append(_prompt(entry, f"{path}, line {number}"))
    wanted = prompts[start:] if count is None else prompts[start : start + count]
    if not wanted or (count is not None and len(wanted) < count):
        raise ValueError(f"{path} holds {len(prompts)} prompts; asked for {count or 'some'} from number {start} on")
    return wanted


def _prompt(entry, where):
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        messages = entry["messages"]
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if messages:
            return {"messages": messages}
    if isinstance(entry, dict) and ("prompt" in entry or "prompt_token_ids" in entry):
        return {name: entry[name] for name in ("prompt", "prompt_token_ids") if name in entry}
    raise ValueError(f"{where} needs 'messages' with a user turn, 'prompt' or 'prompt_token_ids'; got {entry!r:.120}")


def render_chat(tokenizer, messages):
    """A conversation as the prompt for its next assistant turn, through the chat template. ValueError where that fails."""
    from jinja2 import TemplateError

    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "conversations need a tokenizer with a chat template: this model has none, give text or token ids"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation ({error}): {messages!r:.200}") from error


def render_prompt(tokenizer, prompt):
    """What LLM.generate takes, from a line of `read_prompts`: conversations go through the chat template."""
    if "messages" not in prompt:
        return prompt
    text = render_chat(tokenizer, prompt["messages"])
    return {"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
