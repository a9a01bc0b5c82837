"""Turn conversations into token ids with the assistant's tokens marked, through the tokenizer's chat template."""

import re
from collections.abc import Iterator, Sequence

import jinja2
from tqdm import tqdm

from .conversations import excerpt, is_cut

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SENTINEL = "\ue000\ue001\ue000"  # private-use characters, which no text contains by accident
_BATCH = 512  # conversations tokenised at once


def encode_conversations(
    tokenizer, conversations: Sequence[list[dict]], progress: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """(ids, supervised) of each conversation, rendered with the tokenizer's chat template.

    supervised marks the assistant's tokens: those inside the template's `{% generation %}` markers. In a template without
    markers it marks each assistant turn from the generation prompt to the end of its closing text, which is found by
    rendering the conversation without the turn and with a changed turn. After an answer that was cut off
    ("finish_reason": "length") only the template wrote the closing text, so it is not marked. progress: show a bar.
    Raises ValueError, with the example, if the template refuses a conversation, or if the mask cannot be derived, marks
    nothing, or marks everything.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} gives no character offsets, which masks need; use a fast tokenizer"
        )
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set tokenizer.chat_template, or use the "
            "tokenizer of an instruction-tuned model"
        )
    encode = _encode_by_markers if _GENERATION.search(tokenizer.get_chat_template()) else _encode_by_rendering
    encoded = []
    with tqdm(total=len(conversations), desc="tokenising", unit=" conversations", disable=not progress) as bar:
        for start in range(0, len(conversations), _BATCH):
            batch = conversations[start : start + _BATCH]
            try:
                pairs = list(_encode(encode, tokenizer, batch))
            except jinja2.TemplateError as error:
                raise _template_error(error, encode, tokenizer, batch) from error
            for messages, (ids, supervised) in zip(batch, pairs):
                if not any(supervised):
                    raise _mask_error("marks no token as the assistant's", tokenizer, messages)
                if all(supervised):
                    raise _mask_error("marks every token, the request's too, as the assistant's", tokenizer, messages)
                encoded.append((ids, supervised))
            bar.update(len(batch))
    return encoded


def _encode_by_markers(tokenizer, batch: list[list[dict]]) -> Iterator[tuple[list[int], list[bool]]]:
    encoding = tokenizer.apply_chat_template(
        list(batch), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for ids, mask in zip(encoding["input_ids"], encoding["assistant_masks"]):
        yield list(ids), [bool(mark) for mark in mask]


def _encode_by_rendering(tokenizer, batch: list[list[dict]]) -> Iterator[tuple[list[int], list[bool]]]:
    texts, spans = zip(*(_assistant_spans(tokenizer, messages) for messages in batch))
    # The template has already written the special tokens.
    encoding = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    for ids, offsets, turns in zip(encoding["input_ids"], encoding["offset_mapping"], spans):
        marks = [any(a <= start < b for a, b in turns) and end > start for start, end in offsets]
        yield list(ids), marks


def _assistant_spans(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and (start, end) in characters of each assistant turn."""

    text = _render(tokenizer, messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # A turn begins after the generation prompt. Templates do not render an empty conversation, so a first turn begins at its
        # content.
        if turn:
            before = _render(tokenizer, messages[:turn], prompt=True)
        else:
            before = _before_first_turn(tokenizer, messages)
        content_end, end = _closing_span(tokenizer, messages, turn, text)
        if not text.startswith(before) or content_end < len(before):
            raise _turn_error(turn, tokenizer, messages)
        spans.append((len(before), end))
    return text, spans


def _before_first_turn(tokenizer, messages: list[dict]) -> str:
    """The text that the template writes before the content of the first turn."""
    # Templates of thinking models drop the content before </think>, and a sentinel with it.
    for content in (_SENTINEL + messages[0]["content"], _SENTINEL):
        before, found, _ = _render(tokenizer, [{**messages[0], "content": content}, *messages[1:]]).partition(_SENTINEL)
        if found:
            break
    return before


def _closing_span(tokenizer, messages: list[dict], turn: int, text: str) -> tuple[int, int]:
    """(start, end) of the closing text of an assistant turn, after its content, in the rendered conversation."""
    # Text is appended to the content, and the unchanged rest of the rendering begins where the content ends. The turn is changed
    # in its place, because templates may strip whitespace and render earlier turns unlike the last.
    altered = {**messages[turn], "content": messages[turn]["content"] + _SENTINEL}
    _, found, rest = _render(tokenizer, [*messages[:turn], altered, *messages[turn + 1 :]]).partition(_SENTINEL)
    _, found_last, closing = _render(tokenizer, [*messages[:turn], altered]).partition(_SENTINEL)
    if not (found and found_last and text.endswith(rest) and rest.startswith(closing)):
        raise _turn_error(turn, tokenizer, messages)
    content_end = len(text) - len(rest)
    return content_end, content_end + len(closing)


def _render(tokenizer, messages: list[dict], prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _encode(encode, tokenizer, batch: list[list[dict]]) -> Iterator[tuple[list[int], list[bool]]]:
    """`encode` of a batch, without marks on closing text that no answer had."""
    for messages, (ids, supervised) in zip(batch, encode(tokenizer, batch)):
        if any(is_cut(message) for message in messages):
            supervised = _unmark_unwritten_ends(tokenizer, messages, ids, supervised)
        yield ids, supervised


def _unmark_unwritten_ends(tokenizer, messages: list[dict], ids: list[int], supervised: list[bool]) -> list[bool]:
    """`supervised` without the closing text (and end token) that only the template wrote after answers cut off."""
    text = _render(tokenizer, messages)
    spans = [_closing_span(tokenizer, messages, turn, text) for turn, m in enumerate(messages) if is_cut(m)]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == len(ids)
    return [mark and not any(a <= start < b for a, b in spans) for mark, (start, _) in zip(supervised, offsets)]


def _template_error(error, encode, tokenizer, batch: list[list[dict]]) -> ValueError:
    """The exception for a template that failed with `error` on a conversation of the batch; encoding each alone finds it."""
    culprit = batch[0]
    for messages in batch:
        try:
            list(_encode(encode, tokenizer, [messages]))
        except jinja2.TemplateError as own:
            culprit, error = messages, own
            break
    reason = str(error).strip() or type(error).__name__
    try:
        tokenizer.apply_chat_template(culprit, tokenize=False)
    except jinja2.TemplateError:
        return ValueError(
            f"the chat template of {tokenizer.name_or_path!r} refuses a conversation: {reason}. Change or leave out "
            "conversations of this kind (many templates want user and assistant by turns, some no system turn), or use a "
            f"template that takes them. The example: {excerpt({'messages': culprit})}"
        )
    # The whole conversation is fine; the template refused a part of it, rendered to find the assistant's turns.
    return _mask_error(f"refuses a part of a conversation ({reason})", tokenizer, culprit)


def _turn_error(turn: int, tokenizer, messages: list[dict]) -> ValueError:
    return _mask_error(f"does not show where turn {turn + 1} begins and ends", tokenizer, messages)


def _mask_error(what: str, tokenizer, messages: list[dict]) -> ValueError:
    return ValueError(
        f"the chat template of {tokenizer.name_or_path!r} {what}, so the assistant's tokens cannot be told apart; "
        "enclose them in {% generation %} ... {% endgeneration %} in the template. The example: "
        + excerpt({"messages": messages})
    )
