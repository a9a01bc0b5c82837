"""Load instruction data: the conversations of a data set, in one shape.

`load_conversations` reads the built-in "stdlib" set, a .json, .jsonl or .parquet file (the first two also compressed, .gz or
.zst), several files by a pattern, or any name or folder that the `datasets` library loads. record_shapes.py has the shapes of
records. encoding.py turns conversations into token ids, packing.py into rows.

Not done here: images in conversations.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path

from ...heads.storage.atomic_write import write_whole
from .message_fields import count_fields, kept_fields, kept_tools
from .record_shapes import SHAPES, turns_of
from .sources.records import BUILT_IN, UnusableRecord, excerpt, records_of, split_of

# Role names of the two shapes, and of ShareGPT dumps of several assistants.
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
_WEIGHTLESS = "whose answers all have weight 0"  # which is no fault
_MOST_LEFT_OUT = 0.1  # share of the records; with more of them the data are of another kind


def load_conversations(
    data: str, answered: bool = True, note: Callable[[str], None] = lambda text: None, with_fields: bool = True
) -> list[list[dict]]:
    """All conversations of a source, each a list of {"role": "system" | "user" | "assistant" | "tool", "content": str}.

    data: "stdlib" or "installed", a .json, .jsonl (also .gz, .zst) or .parquet file, a pattern of such files
    ("chats/*.jsonl", read in the order of their names), or the name or folder of a dataset for the `datasets` library. A
    split follows a colon, "train" by default: "stdlib:heldout", "OWNER/NAME:train_sft". An answer that was cut off keeps its
    "finish_reason": {..., "finish_reason": "length"}. An answer keeps its "reasoning_content", "tool_calls" and "weight": 0,
    the first message the record's "tools"; without `with_fields` these, and records with turns of tools, are left out.
    Records are left out if they have another shape, role or content, or (with `answered`) no answer, and so is the last line
    of a JSONL file that ends within it; `note` is told how many of each kind, and how many fields. Raises ValueError, naming
    the place, if the records are more than a tenth, for a source that does not exist, and for a line that is not JSON.
    """
    return list(read_conversations(data, answered, note, with_fields))


def read_conversations(
    data, answered=True, note=lambda text: None, with_fields=True, texts=False
) -> Iterator[list[dict]]:
    """The conversations of load_conversations, one after the other; notes and most errors come at the end.

    texts: the records are plain texts, {"text": ...}, each of which becomes [{"role": "text", "content": ...}]
    """
    name, split = split_of(data)
    if name in BUILT_IN:
        if texts:
            raise ValueError(
                f"{name} holds conversations, no plain texts: leave `document: text` out, or name other data"
            )
        yield from (pair.conversation() for pair in BUILT_IN[name](split))
        return
    count, kinds, fields, first, odd = 0, Counter(), Counter(), None, None
    for where, record in records_of(data):
        try:
            if texts:
                messages = _plain_text(record, where)
            else:
                messages = _conversation(record, where, answered, with_fields, fields)
        except UnusableRecord as error:
            kinds[error.kind] += 1
            first = first or error
            odd = odd or (error if error.kind != _WEIGHTLESS else None)
            continue
        yield messages
        count += 1
    if kinds:
        total = count + kinds.total()
        counted = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        if kinds.total() - kinds[_WEIGHTLESS] > _MOST_LEFT_OUT * total:
            raise ValueError(str(odd) + ("" if total == 1 else f"\n({data}: of {total:,} records {counted})"))
        note(f"{data}: {kinds.total():,} of {total:,} records are left out: {counted}. The first: {first}")
    if fields:
        counted = ", ".join(f"{count:,} {name}" for name, count in fields.most_common())
        note(f"{data}: fields of messages and records that are left out: {counted}")
    if not count:
        raise ValueError(f"{data} holds no {'texts' if texts else 'conversations'} (split {split!r})")


class Source:
    """The conversations of a source that is too large for the memory: read anew whenever one goes through them.

    The arguments are those of read_conversations; notes come the first time. count: how many there are, None before that.
    """

    def __init__(self, data, note=lambda text: None, with_fields=True, texts=False):
        self.count, self._data, self._note = None, data, note
        self._how = {"with_fields": with_fields, "texts": texts}

    def __iter__(self):
        note, count = self._note if self.count is None else lambda text: None, 0
        for messages in read_conversations(self._data, note=note, **self._how):
            yield messages
            count += 1
        if self.count not in (None, count):
            raise ValueError(
                f"{self._data} has changed while it was read: {self.count:,} conversations, then {count:,}"
            )
        self.count = count


class Chosen:
    """Those of conversations that `kept` (bool of each) marks, gone through anew each time."""

    def __init__(self, conversations, kept):
        self.count, self._conversations, self._kept = int(kept.sum()), conversations, kept

    def __iter__(self):
        return compress(self._conversations, self._kept)


def is_cut(message: dict) -> bool:
    """Whether this is an answer that was cut off before its end."""
    return message["role"] == "assistant" and message.get("finish_reason") == "length"


def _conversation(record, where: str, answered: bool, with_fields: bool, fields: Counter) -> list[dict]:
    """One record of either shape as messages. `fields` counts the fields that are left out."""
    if isinstance(record, UnusableRecord):
        raise record
    turns = turns_of(record)
    if turns is None:
        what = f"{where}: expected an object with {SHAPES}, found {excerpt(record)}"
        if isinstance(record, dict) and _text(record.get("text")):
            what += "; plain text trains an MLP speculator, with --document text"
        raise UnusableRecord("without turns", what)
    messages, unused = [], Counter()
    roles = _ROLES | {"tool": "tool"} if with_fields else _ROLES
    for turn in turns:
        name = content = None
        if isinstance(turn, dict):
            name = turn.get("role", turn.get("from"))
            content = _text(turn.get("content", turn.get("value")))
        role = roles.get(name.lower()) if isinstance(name, str) else None
        kept = kept_fields(turn, role, unused) if role and with_fields else {}
        if content is None and "tool_calls" in kept:
            content = ""
        if role is None or content is None:
            raise UnusableRecord(
                "with a turn without text" if role else "with a turn of another role",
                f"{where}: a turn needs a role, one of {', '.join(roles)}, and a text, found {excerpt(turn)}",
            )
        message = {"role": role, "content": content, **kept}
        if is_cut({**turn, **message}):
            message["finish_reason"] = "length"
        messages.append(message)
    answers = [message for message in messages if _says_something(message)]
    if answered and answers and all(message.get("weight") == 0 for message in answers):
        raise UnusableRecord(_WEIGHTLESS, f"{where}: every answer has weight 0: {excerpt(record)}")
    if answered and not answers:
        raise UnusableRecord(
            "without an answer",
            f"{where}: a conversation without an assistant turn that says something teaches nothing: {excerpt(record)}",
        )
    if not with_fields:
        count_fields(record, turns, unused)
    elif tools := kept_tools(record, unused):
        messages[0]["tools"] = tools
    if unused:
        fields.update(unused)
    return messages


def _plain_text(record, where):
    """A record of plain text as one message."""
    if isinstance(record, UnusableRecord):
        raise record
    text = _text(record.get("text")) if isinstance(record, dict) else None
    if not text or not text.strip():
        what = f"{where}: `document: text` needs objects with a text under 'text', found {excerpt(record)}"
        raise UnusableRecord("without a text", what)
    return [{"role": "text", "content": text}]


def _says_something(message: dict) -> bool:
    """Whether this is an answer with a text or calls of tools."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _text(content) -> str | None:
    """The content as a string. OpenAI also allows a list of parts; only text parts can be used."""
    if isinstance(content, list) and content and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        return None
    try:
        content.encode()
        return content
    except UnicodeEncodeError:
        # Half an emoji, as in a cut text, is not a character: neither a tokenizer nor a file takes it.
        return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_conversations(path: Path, conversations: list[list[dict]]) -> None:
    """Write conversations as JSONL that `load_conversations` reads (aside, then renamed)."""
    lines = []
    for messages in conversations:
        of_all = {name: messages[0][name] for name in ("tools", "set") if name in messages[0]}
        messages = [{name: value for name, value in one.items() if name not in of_all} for one in messages]
        lines.append(json.dumps({"messages": messages, **of_all}, ensure_ascii=False))
    write_whole(path, "\n".join(lines) + "\n")
