"""Find the assistant's turns in a conversation that a chat template without `{% generation %}` markers has rendered.

Nothing is known of the template: the conversation is rendered again in parts, and with a turn changed in its place. Each turn is
found by itself, so a template may render earlier turns unlike the last, or write into its generation prompt what it does not write
into a finished turn (`<think>`).
"""

from itertools import takewhile

import jinja2

from .conversations import is_cut
from .message_fields import split_tools
from .sources.records import excerpt

_SENTINEL = "\ue000\ue001\ue000"  # private-use characters, which no text contains by accident


class Unencodable(ValueError):
    """A conversation that the chat template does not encode. kind: its fault, one of a few kinds, for counting."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def render(tokenizer, messages: list[dict], prompt: bool = False) -> str:
    """The conversation as text, with the generation prompt after it if asked for."""
    messages, tools = split_tools(messages)
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def assistant_spans(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and (start, end) in characters of each assistant turn."""
    text = render(tokenizer, messages)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return text, [turn_span(tokenizer, messages, turn, text) for turn in turns]


def last_answer(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The conversation with its last message, an answer, as the model wrote it, and (start, end) of that answer alone.

    That is the rendered conversation, unless its generation prompt opens thoughts which the template drops from finished answers:
    then the thoughts follow the prompt. What closes an answer that was cut off is not its own.
    """
    text, turn = render(tokenizer, messages), len(messages) - 1
    closing = closing_span(tokenizer, messages, turn, text)
    prompt = render(tokenizer, messages[:turn], prompt=True) if turn else ""
    written = _with_thoughts(messages[turn], prompt)
    if written is None or text.startswith(prompt):
        start, end = turn_span(tokenizer, messages, turn, text)
        return text, [(start, closing[0] if is_cut(messages[turn]) else end)]
    end = "" if is_cut(messages[turn]) else text[slice(*closing)]
    return prompt + written + end, [(len(prompt), len(prompt + written + end))]


def _with_thoughts(message: dict, prompt: str) -> str | None:
    """What the model wrote after a prompt that ends with <think>; None after another, and without thoughts."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if not prompt.rstrip().endswith("<think>") or not (thoughts or "</think>" in content):
        return None
    if thoughts:
        content = f"{thoughts.strip()}\n</think>\n\n{content}"
    elif content.lstrip().startswith("<think>"):
        content = content.lstrip().removeprefix("<think>")
    return content.lstrip("\n") if prompt.endswith("\n") else content


def turn_span(tokenizer, messages: list[dict], turn: int, text: str) -> tuple[int, int]:
    """(start, end) of an assistant turn in the rendered conversation: what the model writes, its end token too."""
    content_end, end = closing_span(tokenizer, messages, turn, text)
    if turn:
        # A turn begins after the generation prompt.
        before = render(tokenizer, messages[:turn], prompt=True)
    else:
        # Templates do not render an empty conversation, so a first turn begins at its content.
        before = _text_before(tokenizer, messages, turn)
    if before is not None and text.startswith(before):
        start = len(before)
    else:
        start = _start_in_place(tokenizer, messages, turn, text, before)
    # The content of a turn that only calls tools is empty, and what changes with it need not be.
    if start is None or start > (end if messages[turn].get("tool_calls") else content_end):
        raise turn_error(turn, tokenizer, messages)
    return start, end


def closing_span(tokenizer, messages: list[dict], turn: int, text: str) -> tuple[int, int]:
    """(start, end) of the closing text of an assistant turn, after its content, in the rendered conversation.

    Where the template closes this turn unlike a last one, it is only what both begin with, to the end of a special token: the model
    writes what closes a last turn.
    """
    # Text is appended to the content, and the unchanged rest of the rendering begins where the content ends. The turn is changed
    # in its place, because templates may strip whitespace and render earlier turns unlike the last.
    for altered in _altered(messages[turn], lambda value: value + _SENTINEL, last=True):
        _, found, rest = render(tokenizer, [*messages[:turn], altered, *messages[turn + 1 :]]).partition(_SENTINEL)
        _, found_last, closing = render(tokenizer, [*messages[:turn], altered]).partition(_SENTINEL)
        if found and found_last and text.endswith(rest):
            content_end = len(text) - len(rest)
            if not rest.startswith(closing):
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(rest, closing))
                closing = _whole_tokens(tokenizer, "".join(character for character, _ in alike))
            return content_end, content_end + len(closing)
    raise turn_error(turn, tokenizer, messages)


def _whole_tokens(tokenizer, text: str) -> str:
    """The text up to the end of its last special token."""
    ends = [text.rfind(token) + len(token) for token in tokenizer.all_special_tokens if token in text]
    return text[: max(ends, default=0)]


def _start_in_place(tokenizer, messages: list[dict], turn: int, text: str, prompt: str | None) -> int | None:
    """Start of a turn before which the template does not write the generation prompt `prompt` in this conversation."""
    before = _text_before(tokenizer, messages, turn)
    if before is None or not text.startswith(before):
        return None
    # What the template writes between the generation prompt and the answer (a space) is the model's, too.
    alone = messages[: turn + 1]
    before_alone = _text_before(tokenizer, alone, turn)
    if turn and before_alone is not None and before_alone.startswith(prompt):
        between = before_alone[len(prompt) :]
        if before.endswith(between):
            return len(before) - len(between)
    return len(before)


def _text_before(tokenizer, messages: list[dict], turn: int) -> str | None:
    """The text that the template writes before the content (or thoughts) of a turn; None if it cannot be told."""
    # Templates of thinking models drop the content before </think>, and a sentinel with it.
    for change in (lambda value: _SENTINEL + value, lambda value: _SENTINEL):
        for altered in _altered(messages[turn], change):
            changed = [*messages[:turn], altered, *messages[turn + 1 :]]
            before, found, _ = render(tokenizer, changed).partition(_SENTINEL)
            if found:
                return before
    return None


def _altered(message: dict, change, last: bool = False):
    """The message with each of its texts changed in turn, from the first that a template writes, or from the content on."""
    if message.get("reasoning_content") and not last:
        yield {**message, "reasoning_content": change(message["reasoning_content"])}
    yield {**message, "content": change(message["content"])}
    if calls := list(message.get("tool_calls", ())):  # templates may write no content beside calls
        place = -1 if last else 0
        function = {**calls[place]["function"], "name": change(calls[place]["function"]["name"])}
        calls[place] = {**calls[place], "function": function}
        yield {**message, "tool_calls": calls}


def template_error(error: jinja2.TemplateError | TypeError, tokenizer, messages: list[dict]) -> Unencodable:
    """The exception for a template that failed with `error` on a conversation."""
    reason = str(error).strip() or type(error).__name__
    try:
        render(tokenizer, messages)
    except (jinja2.TemplateError, TypeError):
        return Unencodable(
            "refused by the chat template",
            f"the chat template of {tokenizer.name_or_path!r} refuses a conversation: {reason}. Change or leave out "
            "conversations of this kind (many templates want user and assistant by turns, some no system turn), or use a "
            f"template that takes them. The example: {excerpt({'messages': messages})}",
        )
    # The whole conversation is fine; the template refused a part of it, rendered to find the assistant's turns.
    return mask_error(f"refuses a part of a conversation ({reason})", tokenizer, messages)


def turn_error(turn: int, tokenizer, messages: list[dict]) -> Unencodable:
    """The exception for a turn that cannot be found."""
    return mask_error(f"does not show where turn {turn + 1} begins and ends", tokenizer, messages)


def mask_error(what: str, tokenizer, messages: list[dict]) -> Unencodable:
    """The exception for a conversation without a mask that means anything."""
    return Unencodable(
        "whose assistant's tokens cannot be told apart",
        f"the chat template of {tokenizer.name_or_path!r} {what}, so the assistant's tokens cannot be told apart; "
        "enclose them in {% generation %} ... {% endgeneration %} in the template. The example: "
        + excerpt({"messages": messages}),
    )
