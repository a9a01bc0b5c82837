"""Turn conversations into token ids with the assistant's tokens marked, through the tokenizer's chat template."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jinja2
import numpy as np
from tqdm import tqdm

from .answer_spans import (
    Unencodable,
    assistant_spans,
    closing_span,
    last_answer,
    mask_error,
    render,
    template_error,
    turn_span,
)
from .conversations import is_cut
from .message_fields import split_tools
from .packed.documents import Collected, Documents
from .packed.parts import EncodedBatch, Seen
from .packed.pieces import latest_turns, one_per_answer, split_at_turns
from .packed.slices import Borders, Slices
from .packed.texts import TextEncoder
from .packed.workers import batches_of, encode_batches
from .sources.records import excerpt

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
BATCH = 512  # conversations tokenised at once
QUIET = {"verbose": False}  # no warning of texts longer than the model takes: they are split or cut into rows
_MOST_LEFT_OUT = 0.1  # share of the conversations; with more of them the template is not for these data


def encode_conversations(
    tokenizer,
    conversations: Iterable[list[dict]],
    progress: bool = False,
    *,
    note: Callable[[str], None] = lambda text: None,
    rules: int = 1,
) -> Documents:
    """The ids and supervised marks of conversations, rendered with the tokenizer's chat template.

    supervised marks the assistant's tokens: those inside the template's `{% generation %}` markers. In a template without
    markers it marks each assistant turn from the generation prompt to the end of its closing text (answer_spans.py). Whitespace
    after the end token is not marked (with `rules` 0, of runs begun before there were others, it is). After an answer that was cut
    off ("finish_reason": "length") only the template wrote the closing text, so it is not marked, and no answer of "weight" 0 is.
    progress: show a bar.

    Conversations that the template refuses, or whose mask cannot be derived, marks nothing or marks everything, are left out;
    `note` is told how many of each kind. If they are more than a tenth, ValueError shows the first. `note` is also told of fields
    that the template has no place for, and of an end token that is not supervised.
    """
    return encode_places(tokenizer, conversations, progress, note=note, rules=rules)[0]


def encode_places(
    tokenizer,
    conversations,
    progress=False,
    *,
    note=lambda text: None,
    rules=1,
    document="conversation",
    row_length=None,
    total=None,
    workers=0,
    parts=None,
) -> tuple[Documents, np.ndarray]:
    """(Documents of encode_conversations, int64 [D] the place of each among the conversations, ascending).

    document: "conversation"; "answer": each answer with what comes before it, and only it is supervised; "text": the conversations
    are texts (packed/texts.py). row_length: with rules 2 a document longer than that is split at turns; one of an answer loses its
    first turns. total: number of conversations, for the bar; workers: processes that encode (0: this one), with the same result;
    parts: Parts, where encoded batches are kept, and taken from, instead of in memory.
    """
    if document == "text":
        encoder = TextEncoder(tokenizer, row_length)
    else:
        alone = document == "answer"
        encoder = _Encoder(tokenizer, trims=rules > 0, row_length=row_length if rules > 1 else None, alone=alone)
    encoded, places, left_out, seen, count, number = Collected(), [], [], Seen(), 0, 0
    if total is None and isinstance(conversations, Sequence):
        total = len(conversations)
    if total is not None and total <= 4 * BATCH:
        workers = 0  # they would still be starting
    bar = tqdm(total=total, desc="tokenising", unit=" conversations", disable=not progress)
    with bar, contextlib.closing(encode_batches(encoder, batches_of(conversations, BATCH), workers, parts)) as results:
        for number, batch in enumerate(results, 1):  # noqa: B007
            if not parts:
                encoded.extend(batch.documents)
            places.append(batch.places + count)
            left_out += batch.left_out
            seen.update(batch.seen)
            count += batch.count
            bar.update(batch.count)
    if left_out:
        counted = f"{len(left_out):,} of {count:,} conversations are left out: {_count(left_out)}"
        if len(left_out) > _MOST_LEFT_OUT * count:
            raise ValueError(left_out[0][1] + ("" if count == 1 else f"\n({counted})"))
        note(f"{counted}. The first: {left_out[0][1]}")
    for text in encoder.notes(seen):
        note(text)
    documents = parts.documents(number) if parts else encoded.documents()
    return documents, np.concatenate([np.zeros(0, dtype=np.int64), *places])


def choose_encodable(tokenizer, conversations: Sequence[list[dict]], note: Callable[[str], None]) -> list[list[dict]]:
    """Those of a few conversations that the template encodes. ValueError if it encodes none of several."""
    if not conversations:
        return []  # the tokenizer of a base model may have no template
    encoder = _Encoder(tokenizer, trims=True)
    found = encoder.encode(conversations)
    left_out = [one for one in found if isinstance(one, Unencodable)]
    if left_out:
        if len(left_out) == len(found):
            raise left_out[0]
        faults = _count((one.kind, str(one)) for one in left_out)
        note(f"{len(left_out)} of {len(found)} conversations to measure on are left out: {faults}")
    return [messages for messages, one in zip(conversations, found) if not isinstance(one, Unencodable)]


class _Encoder:
    """The encoding of conversations by one tokenizer.

    trims: whitespace after an end token is not supervised; row_length: longer documents are split, None: never; alone: each answer
    is a document of its own, with what comes before it
    """

    def __init__(self, tokenizer, trims: bool, row_length: int | None = None, alone: bool = False):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets, which masks need; use a fast tokenizer"
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set tokenizer.chat_template, or use the "
                "tokenizer of an instruction-tuned model"
            )
        self.tokenizer, self.trims, self.row_length, self.alone = tokenizer, trims, row_length, alone
        self.source = str(tokenizer.chat_template)
        self.has_markers = bool(_GENERATION.search(tokenizer.get_chat_template()))
        self.special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special |= {tokenizer.eos_token_id} - {None}
        self.borders = Borders(tokenizer)
        self._blank = {}  # of token ids: whether they are whitespace

    def encode(self, batch: Sequence[list[dict]]) -> list[tuple[list[int], list[bool]] | Unencodable]:
        """(ids, supervised) of each conversation, or what is wrong with it."""
        if not batch:
            return []
        try:
            pairs = list(self._encode(batch))
        except (jinja2.TemplateError, TypeError, Unencodable):
            if len(batch) > 1:  # encoding each alone finds those at fault
                return [one for messages in batch for one in self.encode([messages])]
            return [self._fault(batch[0])]
        return [self._checked(messages, *pair) for messages, pair in zip(batch, pairs)]

    def _fault(self, messages: list[dict]) -> Unencodable:
        try:
            list(self._encode([messages]))
        except Unencodable as error:
            return error
        except (jinja2.TemplateError, TypeError) as error:
            return template_error(error, self.tokenizer, messages)
        raise AssertionError("encoded at the second attempt")

    def _checked(self, messages, ids, supervised):
        if self._calls_unseen(messages):
            what = "with calls of tools, which the chat template does not render"
            return Unencodable(
                what,
                f"a conversation {what}: use the template of a model that calls tools, or leave such conversations out. The "
                f"example: {excerpt({'messages': messages})}",
            )
        if not any(supervised):
            return mask_error("marks no token as the assistant's", self.tokenizer, messages)
        if all(supervised):
            return mask_error("marks every token, the request's too, as the assistant's", self.tokenizer, messages)
        return ids, self._without_space_after_ends(ids, supervised) if self.trims else supervised

    def _encode(self, batch) -> Iterator[tuple[list[int], list[bool]]]:
        if not self.has_markers:
            encoded = self._encode_by_rendering(batch)
            if self.alone:
                yield from encoded  # of each the last answer is marked, as far as it is the model's
                return
        else:
            encoded = self._encode_by_markers(batch)
        for messages, (ids, supervised) in zip(batch, encoded):
            if self.alone or any(is_cut(one) or one.get("weight") == 0 for one in messages):
                supervised = self._unmark(messages, ids, supervised)
            yield ids, supervised

    def _encode_by_markers(self, batch) -> Iterator[tuple[list[int], list[bool]]]:
        plain = [split_tools(messages) for messages in batch]
        # The template is called with the tools of one conversation.
        calls = [([messages], tools) for messages, tools in plain]
        if not any(tools for _, tools in plain):
            calls = [([messages for messages, _ in plain], None)]
        for conversations, tools in calls:
            encoding = self.tokenizer.apply_chat_template(
                conversations,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs=QUIET,
            )
            for ids, mask in zip(encoding["input_ids"], encoding["assistant_masks"]):
                yield list(ids), [bool(mark) for mark in mask]

    def _encode_by_rendering(self, batch) -> Iterator[tuple[list[int], list[bool]]]:
        find = last_answer if self.alone else assistant_spans
        texts, spans = zip(*(find(self.tokenizer, messages) for messages in batch))
        # The template has already written the special tokens.
        encoding = self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, **QUIET)
        for ids, offsets, turns in zip(encoding["input_ids"], encoding["offset_mapping"], spans):
            marks = [any(a <= start < b for a, b in turns) and end > start for start, end in offsets]
            yield list(ids), marks

    def _unmark(self, messages: list[dict], ids: list[int], supervised: list[bool]) -> list[bool]:
        """`supervised` without answers of weight 0, and without the closing text that only the template wrote after cut ones.

        If answers are documents of their own, also without all answers but the last.
        """
        text = render(self.tokenizer, messages)
        spans, turns = [], list(enumerate(messages))
        if self.alone:
            turns = turns[-1:]
            spans.append((0, turn_span(self.tokenizer, messages, len(messages) - 1, text)[0]))
        for turn, message in turns:
            if message.get("weight") == 0:
                spans.append(turn_span(self.tokenizer, messages, turn, text))
            elif is_cut(message):
                spans.append(closing_span(self.tokenizer, messages, turn, text))
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, **QUIET)["offset_mapping"]
        assert len(offsets) == len(ids)
        return [mark and not any(a <= start < b for a, b in spans) for mark, (start, _) in zip(supervised, offsets)]

    def _without_space_after_ends(self, ids: list[int], supervised: list[bool]) -> list[bool]:
        """`supervised` without what templates write after an answer's end token, where the model has stopped: whitespace, and
        special tokens after it."""
        supervised = list(supervised)
        for start, end in stretches(supervised):
            cut = last = end
            while last > start and (ids[last - 1] in self.special or self._is_blank(ids[last - 1])):
                last -= 1
                if ids[last] in self.special and last + 1 < end and self._is_blank(ids[last + 1]):
                    cut = last + 1
            supervised[cut:end] = [False] * (end - cut)
        return supervised

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            blank = token not in self.special and not self.tokenizer.decode([token]).strip()
            self._blank[token] = blank
        return self._blank[token]

    def _calls_unseen(self, messages) -> bool:
        """Whether a conversation calls tools and the template does not render it."""
        return "tool_calls" not in self.source and any(m["role"] == "tool" or "tool_calls" in m for m in messages)

    def encode_batch(self, batch):
        """The EncodedBatch of some conversations."""
        encoded, places, left_out, seen = Collected(), [], [], Seen()
        for place, (messages, found) in enumerate(zip(batch, self._documents(batch, seen))):
            if isinstance(found, Unencodable):
                left_out.append((found.kind, str(found)))
                continue
            seen.with_tools += "tools" in messages[0]
            for part, *one in found:
                encoded.append(*one)
                places.append(place)
                self._look(part, *one, seen)
        return EncodedBatch(len(batch), encoded.documents(), np.array(places, dtype=np.int64), left_out, seen)

    def _documents(self, batch, seen):
        """Of each conversation its documents, [(messages, ids, supervised)], or what is wrong with it (Unencodable)."""
        parts = [one_per_answer(messages) if self.alone else [messages] for messages in batch]
        encoded = iter(self.encode([part for some in parts for part in some]))
        for some in parts:
            found = [(part, next(encoded)) for part in some]
            fault = next((one for _, one in found if isinstance(one, Unencodable)), None)
            yield fault or [piece for part, one in found for piece in self._split(part, *one, seen)]

    def _split(self, messages, ids, supervised, seen):
        """[(messages, ids, supervised)] of a document: in pieces, if it is longer than a row and the template encodes them."""
        if not self.row_length or len(ids) <= self.row_length:
            return [(messages, ids, supervised)]
        slices = Slices(messages, self._text, partial(render, self.tokenizer), ids, supervised, self.borders)
        choose = latest_turns if self.alone else split_at_turns
        pieces = choose(messages, lambda piece: self._fits(piece, slices), self.row_length / len(ids))
        found = [self._piece(piece, slices) for piece in pieces]
        if pieces in ([], [messages]) or any(isinstance(one, Unencodable) for one in found):
            return [(messages, ids, supervised)]
        seen.long += 1
        seen.pieces += len(pieces)
        return [(piece, *one) for piece, one in zip(pieces, found)]

    def _piece(self, piece, slices):
        """What `encode` finds of one piece."""
        found = self._sliced(piece, slices)
        return found if found and any(found[1]) and not all(found[1]) else self.encode([piece])[0]

    @staticmethod
    def _sliced(piece, slices):
        with contextlib.suppress(jinja2.TemplateError, TypeError, Unencodable):
            return slices.of(piece)

    def _fits(self, messages, slices) -> bool:
        """Whether a part of a conversation fits into a row."""
        if found := self._sliced(messages, slices):
            return len(found[0]) <= self.row_length
        try:
            text = self._text(messages)
        except (jinja2.TemplateError, TypeError, Unencodable):
            return False
        return len(self.tokenizer(text, add_special_tokens=False, **QUIET)["input_ids"]) <= self.row_length

    def _text(self, messages) -> str:
        """The text of a document."""
        if self.alone and not self.has_markers:
            return last_answer(self.tokenizer, messages)[0]
        return render(self.tokenizer, messages)

    def _look(self, messages, ids, supervised, seen):
        """Count in `seen` what a document shows."""
        thoughts = list(filter(None, map(_thoughts, messages[-1:] if self.alone else messages)))
        if thoughts:
            text = self._text(messages)
            seen.thoughts += len(thoughts)
            seen.unwritten += sum(one not in text for one in thoughts)
        if seen.has_end or any(map(is_cut, messages[-1:] if self.alone else messages)):
            return
        for _, end in stretches(self._without_space_after_ends(ids, supervised)):
            if ids[end - 1] in self.special:
                seen.has_end = True
                return
            seen.ends += 1
            after = ids[end] if end < len(ids) and ids[end] in self.special else -1
            seen.after[after] = seen.after.get(after, 0) + 1

    def notes(self, seen: Seen) -> Iterator[str]:
        """What to tell the user: of fields that the template does not write, and of end tokens that are not supervised."""
        if not re.search(r"\btools\b", self.source) and seen.with_tools:
            yield f"the chat template does not write tools: those of {seen.with_tools:,} conversations are left out"
        if seen.unwritten:
            yield (
                f"the chat template does not write the thoughts of {seen.unwritten:,} of {seen.thoughts:,} answers that have any: "
                "they are left out (many templates keep only those of the last answer)"
            )
        if seen.long and self.alone:
            yield f"{seen.long:,} answers lose the first turns before them, so that they fit into {self.row_length} tokens"
        elif seen.long:
            yield f"{seen.long:,} conversations longer than {self.row_length} tokens are split at turns, into {seen.pieces:,}"
        if seen.has_end or not seen.ends:
            return
        token = max(seen.after, key=seen.after.get)
        learns = "so the head does not learn where answers end"
        if self.has_markers and token >= 0:
            name = self.tokenizer.convert_ids_to_tokens(token)
            yield (
                "no answer's end token is supervised: the {% generation %} markers of the chat template leave "
                f"{name!r} out, {learns}; move {{% endgeneration %}} after it"
            )
        else:
            yield (
                f"no answer's end token is supervised: the chat template closes no answer with a special token, {learns}; if the "
                f"model ends answers with one (the tokenizer's is {self.tokenizer.eos_token!r}), write it after the assistant's "
                "content in the template"
            )


def stretches(supervised: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of marked tokens."""
    edges = np.flatnonzero(np.diff(np.asarray(supervised, dtype=np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def _thoughts(message: dict) -> str:
    """Thoughts of an answer, in a field of their own or at the beginning of the content."""
    if message["role"] != "assistant":
        return ""
    thoughts, ended, _ = message["content"].rpartition("</think>")
    return (message.get("reasoning_content") or (thoughts if ended else "")).removeprefix("<think>").strip()


def _count(faults: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in Counter(kind for kind, _ in faults).most_common())
