"""Prompts from JSONL files: lines {"messages": [...]}, {"prompt": "..."} or {"prompt_token_ids": [...]}.

Beside messages a line may have "tools", which the chat template writes, and "set", the name of the set that it belongs to.
"""

import contextlib
import json
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path

OURS = (
    "conversation",
    "tokenize",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)  # a template's options may not repeat these
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_prompts(path, start=0, count=None):
    """The prompts of lines start .. start + count of a JSONL file, as `render_prompt` takes them.

    The answer at the end of a conversation is left out. ValueError names file and line of an entry that cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"no prompt file {path}; expected JSONL with 'messages', 'prompt' or 'prompt_token_ids' in each line"
        )
    prompts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number} is not UTF-8 text: {error}") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            prompts.append(_prompt(entry, f"{path}, line {number}"))
    wanted = prompts[start:] if count is None else prompts[start : start + count]
    if not wanted or (count is not None and len(wanted) < count):
        raise ValueError(f"{path} holds {len(prompts)} prompts; asked for {count or 'some'} from number {start} on")
    return wanted


def in_turn(prompts):
    """Prompts of several named sets ("set" of their lines), the first of each, then the second; others in their order."""
    sets = defaultdict(list)
    for prompt in prompts:
        sets[prompt.get("set")].append(prompt)
    return [one for one in chain.from_iterable(zip_longest(*sets.values())) if one is not None]


def _prompt(entry, where):
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        messages = entry["messages"]
        for message in messages:
            check_message(message, where)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if messages:
            named = {"set": entry["set"]} if isinstance(entry.get("set"), str) else {}
            return {"messages": messages} | named | ({"tools": tools} if (tools := _tools(entry, where)) else {})
    if isinstance(entry, dict) and ("prompt" in entry or "prompt_token_ids" in entry):
        if isinstance(entry.get("prompt"), str):
            check_text(entry["prompt"], f"{where}: the prompt")
        return {name: entry[name] for name in ("prompt", "prompt_token_ids") if name in entry}
    raise ValueError(f"{where} needs 'messages' with a user turn, 'prompt' or 'prompt_token_ids'; got {entry!r:.120}")


def _tools(entry, where):
    """The tools of a conversation, a list of objects; None if it has none."""
    tools = entry.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        with contextlib.suppress(json.JSONDecodeError):
            tools = json.loads(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where}: tools must be a list of objects, or its JSON text; got {tools!r:.120}")
    return tools or None


def check_text(text, where):
    """ValueError for a string that is not valid Unicode: a tokenizer refuses half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} is not valid Unicode text: the character {error.start + 1} is half of one, as of bytes not in UTF-8 or "
            f"a text that was cut: {text[max(error.start - 20, 0) : error.start + 20]!r}"
        ) from None


def check_message(message, where):
    """ValueError unless a message has a role, and content that a template can render."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: a message is {{'role': ..., 'content': ...}}, got {message!r:.120}")
    content = message.get("content")
    # An assistant message that only calls tools has no content.
    if not (isinstance(content, str) or (isinstance(content, list) and content)) and not message.get("tool_calls"):
        raise ValueError(f"{where}: a message needs 'content', the text as a string; got {message!r:.120}")
    for part in content if isinstance(content, list) else []:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(
                f"{where}: of content in parts only {{'type': 'text', 'text': ...}} is taken, got {part!r:.120}"
            )
    check_text(str(joined(message).get("content") or ""), f"{where}: the content")


def joined(message):
    """The message with its content joined to one string: templates of text models would print a list as Python does."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def render_chat(
    tokenizer,
    messages,
    options=None,
    tools=None,
    chat_template=None,
    add_generation_prompt=True,
    continue_final_message=False,
):
    """A conversation as the prompt for its next assistant turn, through the chat template.

    options: {name: value}, further arguments of the template; tools: a list of functions for the template, as JSON schemas;
    chat_template: one to use instead of the tokenizer's; add_generation_prompt: end with what begins an assistant turn;
    continue_final_message: end within the last message instead.
    Raises ValueError without a template, for messages without a role or content, for roles that neither ROLES nor the template
    names, and where the template refuses.
    """
    from jinja2 import TemplateError

    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            "chat takes a conversation, a non-empty list of {'role': ..., 'content': ...}, or a list of conversations; "
            f"got {messages!r:.120}"
        )
    if tokenizer is None:
        raise ValueError("conversations need a tokenizer, and there is none: build the LLM with tokenizer=...")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message goes on within the last message: say add_generation_prompt=False with it"
        )
    if not (chat_template or tokenizer.chat_template):
        raise ValueError("conversations need a chat template, and this tokenizer has none: give text or token ids")
    if not isinstance(options or {}, dict) or any(name in (options or ()) for name in OURS):
        raise ValueError(
            f"chat_template_kwargs are what the template takes besides, as a dict without {', '.join(OURS)}; got {options!r:.80}"
        )
    template = str(chat_template or tokenizer.chat_template)
    for number, message in enumerate(messages):
        check_message(message, f"message {number} of the conversation")
        role = message["role"]
        if role not in ROLES and repr(role) not in template and f'"{role}"' not in template:
            raise ValueError(
                f"message {number} of the conversation has the unknown role {role!r}: known are {', '.join(ROLES)}, and "
                "what the chat template names"
            )
    try:
        return tokenizer.apply_chat_template(
            list(map(joined, messages)),
            tokenize=False,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(options or {}),
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation ({error}): {messages!r:.200}") from error


def render_prompt(tokenizer, prompt):
    """A prompt for LLM.generate from an entry of `read_prompts`: conversations go through the chat template."""
    if "messages" not in prompt:
        return prompt
    text = render_chat(tokenizer, prompt["messages"], tools=prompt.get("tools"))
    return {"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
