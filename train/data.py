"""Instruction data: conversations -> token ids with the assistant's tokens marked -> packed rows.

`load_conversations` reads the built-in "stdlib" set, a .json, .jsonl or .parquet file, or whatever the `datasets` library
loads under a name or from a folder, in the ShareGPT (`conversations`: from/value) or OpenAI (`messages`: role/content) shape.
`encode_conversations` renders them with the tokenizer's chat template and marks what the assistant says. `pack` fills
rows with whole documents; `block_attention_mask` keeps attention inside each of them.

Not done here: shuffling, batching and moving to a device (the trainers), tools and images in conversations.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import torch
from tqdm import tqdm

from .stdlib_pairs import installed_pairs, stdlib_pairs

# Sets made of the Python source on this machine, by the name that `data` takes.
BUILT_IN = {"stdlib": stdlib_pairs, "installed": installed_pairs}

# Role names of the two shapes, and of ShareGPT dumps of several assistants.
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
_MOST_LEFT_OUT = 0.1  # of the records: of more the data are not what they are taken for
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SENTINEL = "\ue000\ue001\ue000"  # private-use characters, which no text contains by accident
_BATCH = 512  # conversations tokenised at once


def load_conversations(
    data: str, answered: bool = True, note: Callable[[str], None] = lambda text: None
) -> list[list[dict]]:
    """Conversations, each a list of {"role": "system" | "user" | "assistant", "content": str}.

    data: "stdlib" or "installed", a .json, .jsonl or .parquet file, or the name or folder of a dataset for the `datasets`
    library; of sets with splits behind a colon which one, "train" where none is named: "stdlib:heldout",
    "OWNER/NAME:train_sft". An answer that was cut off, as its "finish_reason" says, keeps that one: {..., "finish_reason":
    "length"}. Records of another shape, with another role or content, and, where `answered`, without an answer are left out,
    and `note` is told how many of what kind. Raises ValueError, naming the place, where they are more than a tenth, for a
    source that does not exist and for a line that is no JSON.
    """
    name, split = split_of(data)
    if name in BUILT_IN:
        return [pair.conversation() for pair in BUILT_IN[name](split)]
    path = Path(name).expanduser()
    if path.suffix in (".json", ".jsonl"):
        if split != "train":
            raise ValueError(f"{name} is one file and has no split {split!r}; its only split is 'train'")
        records = _read_json(path) if path.suffix == ".json" else _read_jsonl(path)
    else:
        records = _read_dataset(name, path, split)
    conversations, left_out = [], []
    for where, record in records:
        try:
            conversations.append(_conversation(record, where, answered))
        except _UnusableRecord as error:
            left_out.append(error)
    if left_out:
        total = len(conversations) + len(left_out)
        kinds = Counter(error.kind for error in left_out)
        counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        if len(left_out) > _MOST_LEFT_OUT * total:
            raise ValueError(str(left_out[0]) + ("" if total == 1 else f"\n({data}: of {total:,} records {counted})"))
        note(f"{data}: {len(left_out):,} of {total:,} records are left out: {counted}. The first: {left_out[0]}")
    if not conversations:
        raise ValueError(f"{data} holds no conversations (split {split!r})")
    return conversations


def split_of(data: str) -> tuple[str, str]:
    """What `data` names, and which split of it: "NAME:SPLIT" apart, and "train" where none is named."""
    name, colon, split = data.rpartition(":")
    return (name, split) if colon and split and not Path(data).expanduser().exists() else (data, "train")


def encode_conversation(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """Token ids of one conversation, and for each token whether it is the assistant's. See `encode_conversations`."""
    return encode_conversations(tokenizer, [messages])[0]


def encode_conversations(
    tokenizer, conversations: Sequence[list[dict]], progress: bool = False
) -> list[tuple[list[int], list[bool]]]:
    """(ids, supervised) of each conversation, rendered with the tokenizer's chat template.

    supervised marks the assistant's tokens: what the template's `{% generation %}` markers enclose, or, in a template
    without them, each assistant turn from the generation prompt to the end of its closing text, found by rendering the
    conversation with the turn left out and altered. Behind an answer that was cut off ("finish_reason": "length") the
    closing text is the template's alone, and is not marked. progress: show a bar.
    Raises ValueError, with the example, where the template refuses a conversation, and where such a mask cannot be
    derived, marks nothing, or marks everything.
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


@dataclass(frozen=True)
class PackedRows:
    """R rows of T tokens. Padding has document id -1, position 0 and is not supervised."""

    input_ids: torch.Tensor  # [R, T] int64
    position_ids: torch.Tensor  # [R, T] int64, restarting in every document
    document_ids: torch.Tensor  # [R, T] int64: the document's index in the input of `pack`, -1 on padding
    supervised: torch.Tensor  # [R, T] bool
    num_cut: int = 0  # documents that were longer than a row and lost their end


def pack(encoded: Sequence[tuple[Sequence[int], Sequence[bool]]], length: int, pad_token_id: int = 0) -> PackedRows:
    """Fill rows of `length` tokens with whole documents, each put where it leaves the least room (best fit).

    No document is spread over two rows: one longer than a row keeps its first `length` tokens, the rest is dropped
    and counted in `num_cut`. Documents keep their order as far as they fit; the result depends on nothing but the input.
    Raises ValueError for a length below 2 and where there is no document.
    """
    if length < 2:
        raise ValueError(f"length {length} is too short for a row: a label needs a token before it, so at least 2")
    rows = _best_fit([min(len(ids), length) for ids, _ in encoded], length)
    if not rows:
        raise ValueError("there is nothing to pack: no document has a token")
    order = np.concatenate(rows)  # documents as they lie in the rows
    lengths = np.minimum([len(encoded[document][0]) for document in order], length)
    ends = np.cumsum(lengths)
    per_row = np.cumsum([len(row) for row in rows])
    row_start = np.concatenate([[0], ends[per_row - 1]])  # tokens before each row
    row_of = np.repeat(np.arange(len(rows)), np.diff(per_row, prepend=0))
    starts = row_of * length + (ends - lengths) - row_start[row_of]  # where each document begins, rows joined
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    place = torch.from_numpy(np.repeat(starts, lengths) + positions)

    def filled(values, empty, dtype):
        flat = torch.full((len(rows) * length,), empty, dtype=dtype)
        flat[place] = torch.from_numpy(values).to(dtype)
        return flat.view(len(rows), length)

    input_ids = filled(np.concatenate([encoded[i][0][:length] for i in order]), pad_token_id, torch.int64)
    supervised = filled(np.concatenate([encoded[i][1][:length] for i in order]), False, torch.bool)
    position_ids = filled(positions, 0, torch.int64)
    document_ids = filled(np.repeat(order, lengths), -1, torch.int64)
    num_cut = sum(len(ids) > length for ids, _ in encoded)
    return PackedRows(input_ids, position_ids, document_ids, supervised, num_cut)


def block_attention_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] document ids -> bool [B, 1, T, T], True where the query (third axis) may attend to the key (last axis).

    Causal and inside one document; a padding position attends to itself alone, as a row of nothing would be NaN. For
    models on SDPA attention: transformers' eager attention adds its mask and needs a float one.
    """
    num_tokens = document_ids.shape[-1]
    same = document_ids[:, :, None] == document_ids[:, None, :]  # [B, T, T]
    real = (document_ids >= 0)[:, :, None]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=document_ids.device).tril()
    itself = torch.eye(num_tokens, dtype=torch.bool, device=document_ids.device)
    return ((same & real & causal) | itself)[:, None]


def _best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows as lists of indices; index i takes lengths[i] of a row's capacity. Empty documents are left out."""
    rows = []
    open_rows = [[] for _ in range(capacity + 1)]  # by room left
    has_room = 0  # bit r is set while open_rows[r] is not empty: one shift finds the tightest row that fits
    for index, length in enumerate(lengths):
        if length == 0:
            continue
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                has_room ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > length:
            open_rows[room - length].append(row)
            has_room |= 1 << (room - length)
    return rows


def _encode_by_markers(tokenizer, batch: list[list[dict]]) -> Iterator[tuple[list[int], list[bool]]]:
    encoding = tokenizer.apply_chat_template(
        list(batch), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for ids, mask in zip(encoding["input_ids"], encoding["assistant_masks"]):
        yield list(ids), [bool(mark) for mark in mask]


def _encode_by_rendering(tokenizer, batch: list[list[dict]]) -> Iterator[tuple[list[int], list[bool]]]:
    texts, spans = zip(*(_assistant_spans(tokenizer, messages) for messages in batch))
    # The template has written the special tokens already.
    encoding = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    for ids, offsets, turns in zip(encoding["input_ids"], encoding["offset_mapping"], spans):
        marks = [any(a <= start < b for a, b in turns) and end > start for start, end in offsets]
        yield list(ids), marks


def _assistant_spans(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and where in it the assistant speaks: (start, end) in characters, per turn."""

    text = _render(tokenizer, messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # A turn begins where the model would be asked to go on; templates do not render an empty conversation, so a first turn's
        # beginning is where its content stands.
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
    """What the template writes before the content of the first turn."""
    # Of a content, templates of thinking models drop what stands before </think>, a sentinel with it.
    for content in (_SENTINEL + messages[0]["content"], _SENTINEL):
        before, found, _ = _render(tokenizer, [{**messages[0], "content": content}, *messages[1:]]).partition(_SENTINEL)
        if found:
            break
    return before


def _closing_span(tokenizer, messages: list[dict], turn: int, text: str) -> tuple[int, int]:
    """Where in the rendered conversation the closing text of an assistant turn stands, behind the turn's content."""
    # The content ends where the rest begins that stays when something is added to the content: templates may strip
    # whitespace and render earlier turns unlike the last, so the turn is altered in its place.
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
    """What `encode` gives of a batch, without marks on ends that no answer had."""
    for messages, (ids, supervised) in zip(batch, encode(tokenizer, batch)):
        if any(_is_cut(message) for message in messages):
            supervised = _unmark_unwritten_ends(tokenizer, messages, ids, supervised)
        yield ids, supervised


def _is_cut(message: dict) -> bool:
    """Whether this is an answer that its writer was not let finish."""
    return message["role"] == "assistant" and message.get("finish_reason") == "length"


def _unmark_unwritten_ends(tokenizer, messages: list[dict], ids: list[int], supervised: list[bool]) -> list[bool]:
    """`supervised` without the closing text, its end token too, that only the template wrote behind answers cut off."""
    text = _render(tokenizer, messages)
    spans = [_closing_span(tokenizer, messages, turn, text) for turn, m in enumerate(messages) if _is_cut(m)]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == len(ids)
    return [mark and not any(a <= start < b for a, b in spans) for mark, (start, _) in zip(supervised, offsets)]


def _template_error(error, encode, tokenizer, batch: list[list[dict]]) -> ValueError:
    """What to raise when the template stopped with `error` on one of the batch, which is found by encoding each alone."""
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
            f"template that takes them. The example: {_excerpt({'messages': culprit})}"
        )
    # The whole is fine; what was refused is a part of it, rendered to find where the assistant speaks.
    return _mask_error(f"refuses a part of a conversation ({reason})", tokenizer, culprit)


def _turn_error(turn: int, tokenizer, messages: list[dict]) -> ValueError:
    return _mask_error(f"does not show where turn {turn + 1} begins and ends", tokenizer, messages)


def _mask_error(what: str, tokenizer, messages: list[dict]) -> ValueError:
    return ValueError(
        f"the chat template of {tokenizer.name_or_path!r} {what}, so the assistant's tokens cannot be told apart; "
        "enclose them in {% generation %} ... {% endgeneration %} in the template. The example: "
        + _excerpt({"messages": messages})
    )


class _UnusableRecord(ValueError):
    """kind: which of few kinds of fault, for counting."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def _conversation(record, where: str, answered: bool) -> list[dict]:
    """One record of either shape as messages."""
    turns = (record.get("messages") or record.get("conversations")) if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns:
        raise _UnusableRecord(
            "without turns",
            f"{where}: expected an object with a list under 'messages' (role/content) or 'conversations' (from/value), "
            f"found {_excerpt(record)}",
        )
    messages = []
    for turn in turns:
        name = content = None
        if isinstance(turn, dict):
            name = turn.get("role", turn.get("from"))
            content = _text(turn.get("content", turn.get("value")))
        role = _ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None or content is None:
            raise _UnusableRecord(
                "with a turn without text" if role else "with a turn of another role",
                f"{where}: a turn needs a role, one of {', '.join(_ROLES)}, and a text, found {_excerpt(turn)}",
            )
        message = {"role": role, "content": content}
        if _is_cut({**turn, **message}):
            message["finish_reason"] = "length"
        messages.append(message)
    if answered and not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise _UnusableRecord(
            "without an answer",
            f"{where}: a conversation without an assistant turn that says something teaches nothing: {_excerpt(record)}",
        )
    return messages


def _text(content) -> str | None:
    """The content as a string; OpenAI also allows a list of parts, of which only texts can be used."""
    if isinstance(content, list) and content and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        return None
    # Half an emoji, as cut texts hold it, is no character: no tokenizer takes it, and no file.
    return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}): {line[:200]!r}") from None


def _read_json(path: Path) -> Iterator[tuple[str, object]]:
    try:
        records = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        lines = "; one object per line? then name it .jsonl" if error.msg == "Extra data" else ""
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error}){lines}") from None
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a JSON list of conversations, found {_excerpt(records)}")
    yield from ((f"{path}, item {number}", record) for number, record in enumerate(records, 1))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"the data file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the data file {path} is not UTF-8 text: {error}") from None


def _read_dataset(data: str, path: Path, split: str) -> Iterable[tuple[str, object]]:
    if not path.exists() and (data.startswith((".", "/", "~")) or data.count("/") > 1):
        what = "file" if path.suffix == ".parquet" else "folder"
        raise ValueError(f"the data {what} {data} does not exist; --data takes 'stdlib', a file, a folder or a name")
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"--data {data} needs the `datasets` library (pip install datasets); .json and .jsonl files do not"
        ) from None
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            rows = datasets.load_from_disk(str(path))
        elif path.suffix == ".parquet" and path.is_file():
            rows = datasets.load_dataset("parquet", data_files=str(path))
        else:
            rows = datasets.load_dataset(str(path) if path.is_dir() else data)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"the dataset {data!r} cannot be loaded ({type(error).__name__}: {error}); --data takes 'stdlib', a .json "
            "or .jsonl file, a folder, or the name of a dataset on the Hub (which needs the network the first time)"
        ) from error
    if isinstance(rows, dict):
        if split not in rows:
            raise ValueError(
                f"the dataset {data!r} has no split {split!r}, only {', '.join(map(str, rows))}: name one, as "
                f"{data}:{next(iter(rows))}"
            )
        rows = rows[split]
    elif split != "train":
        raise ValueError(f"the dataset {data!r} was saved as one split and has no {split!r}; ask for 'train'")
    return ((f"{data}, row {number}", row) for number, row in enumerate(rows, 1))


def _excerpt(value, limit: int = 400) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def write_conversations(path: Path, conversations: list[list[dict]]) -> None:
    """Write conversations as JSONL that `load_conversations` reads (aside, then renamed)."""
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations]
    aside = path.with_name(path.name + ".partial")
    aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    aside.replace(path)
