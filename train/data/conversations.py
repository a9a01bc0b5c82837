"""Load instruction data: the conversations of a data set, in one shape.

`load_conversations` reads the built-in "stdlib" set, a .json, .jsonl or .parquet file (the first two also compressed, .gz or
.zst), several files by a pattern, or any name or folder that the `datasets` library loads. record_shapes.py has the shapes of
records. encoding.py turns conversations into token ids, packing.py into rows.

Not done here: images in conversations.
"""

import codecs
import glob
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from pathlib import Path

from ...heads.storage.atomic_write import write_whole
from .message_fields import count_fields, kept_fields, kept_tools
from .record_shapes import SHAPES, turns_of
from .stdlib_pairs import installed_pairs, stdlib_pairs

# Sets made from the Python source on this machine, by their name in `data`.
BUILT_IN = {"stdlib": stdlib_pairs, "installed": installed_pairs}

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


def read_conversations(data, answered=True, note=lambda text: None, with_fields=True) -> Iterator[list[dict]]:
    """The conversations of load_conversations, one after the other; notes and most errors come at the end."""
    name, split = split_of(data)
    if name in BUILT_IN:
        yield from (pair.conversation() for pair in BUILT_IN[name](split))
        return
    records = chain.from_iterable(_records(file, split) for file in _files(name))
    count, kinds, fields, first, odd = 0, Counter(), Counter(), None, None
    for where, record in records:
        try:
            messages = _conversation(record, where, answered, with_fields, fields)
        except _UnusableRecord as error:
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
        raise ValueError(f"{data} holds no conversations (split {split!r})")


class Source:
    """The conversations of a source that is too large for the memory: read anew whenever one goes through them.

    The arguments are those of load_conversations; notes come the first time. count: how many there are, None before that.
    """

    def __init__(self, data, note=lambda text: None, with_fields=True):
        self.count, self._data, self._note, self._with_fields = None, data, note, with_fields

    def __iter__(self):
        note, count = self._note if self.count is None else lambda text: None, 0
        for messages in read_conversations(self._data, note=note, with_fields=self._with_fields):
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


def is_pattern(name: str) -> bool:
    """Whether this is a pattern of files, and not a file or the name of a data set."""
    return any(sign in name for sign in "*?[") and not Path(name).expanduser().exists()


def source_facts(data: str) -> dict | None:
    """What tells whether a source has changed: its files with their sizes and times, or the fingerprint that `datasets` gives it.

    None for built-in sets, which are made from the Python source, and for what load_conversations does not find.
    """
    name, split = split_of(data)
    if name in BUILT_IN:
        return None
    files, sets = [], []
    for one in _files(name):
        path = Path(one).expanduser()
        if path.is_file():
            found = path.stat()
            files.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
        elif _kind(path) in (".json", ".jsonl"):
            return None
        else:
            sets.append([one, _dataset(one, path, split)._fingerprint])
    return {"split": split, "files": files, "sets": sets}


def _files(name: str) -> list[str]:
    """The names that a pattern stands for, in order; any other name itself."""
    if not is_pattern(name):
        return [name]
    found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))
    if not found:
        raise ValueError(f"no file matches the pattern {name}")
    return found


def _records(name: str, split: str) -> Iterable[tuple[str, object]]:
    """(place, record) of a file, folder or name."""
    path = Path(name).expanduser()
    kind = _kind(path)
    if kind not in (".json", ".jsonl"):
        return _read_dataset(name, path, split)
    if split != "train":
        raise ValueError(f"{name} is one file and has no split {split!r}; its only split is 'train'")
    return _read_json(path) if kind == ".json" else _read_jsonl(path)


def _kind(path: Path) -> str:
    """The suffix of a file, without that of its compression."""
    return Path(path.stem).suffix if path.suffix in _OPENED else path.suffix


def split_of(data: str) -> tuple[str, str]:
    """(name, split) of `data`: "NAME:SPLIT" taken apart; the split is "train" if none is named."""
    name, colon, split = data.rpartition(":")
    return (name, split) if colon and split and not Path(data).expanduser().exists() else (data, "train")


def is_cut(message: dict) -> bool:
    """Whether this is an answer that was cut off before its end."""
    return message["role"] == "assistant" and message.get("finish_reason") == "length"


class _UnusableRecord(ValueError):
    """A record that cannot be used. kind: its fault, one of a few kinds, for counting."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def _conversation(record, where: str, answered: bool, with_fields: bool, fields: Counter) -> list[dict]:
    """One record of either shape as messages. `fields` counts the fields that are left out."""
    if isinstance(record, _UnusableRecord):
        raise record
    turns = turns_of(record)
    if turns is None:
        raise _UnusableRecord("without turns", f"{where}: expected an object with {SHAPES}, found {excerpt(record)}")
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
            raise _UnusableRecord(
                "with a turn without text" if role else "with a turn of another role",
                f"{where}: a turn needs a role, one of {', '.join(roles)}, and a text, found {excerpt(turn)}",
            )
        message = {"role": role, "content": content, **kept}
        if is_cut({**turn, **message}):
            message["finish_reason"] = "length"
        messages.append(message)
    answers = [message for message in messages if _says_something(message)]
    if answered and answers and all(message.get("weight") == 0 for message in answers):
        raise _UnusableRecord(_WEIGHTLESS, f"{where}: every answer has weight 0: {excerpt(record)}")
    if answered and not answers:
        raise _UnusableRecord(
            "without an answer",
            f"{where}: a conversation without an assistant turn that says something teaches nothing: {excerpt(record)}",
        )
    if not with_fields:
        count_fields(record, turns, unused)
    elif tools := kept_tools(record, unused):
        messages[0]["tools"] = tools
    fields.update(unused)
    return messages


def _says_something(message: dict) -> bool:
    """Whether this is an answer with a text or calls of tools."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _text(content) -> str | None:
    """The content as a string. OpenAI also allows a list of parts; only text parts can be used."""
    if isinstance(content, list) and content and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        return None
    # Half an emoji, as in a cut text, is not a character: neither a tokenizer nor a file takes it.
    return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                what = f"{path}, line {number}: not JSON ({error}): {line[:200]!r}"
                if line.endswith("\n"):
                    raise ValueError(what) from None
                record = _UnusableRecord("cut off, the last line of the file", what)  # no line end follows it
            yield f"{path}, line {number}", record


def _read_json(path: Path) -> Iterator[tuple[str, object]]:
    try:
        records = json.loads("".join(_read_lines(path)))
    except json.JSONDecodeError as error:
        lines = "; one object per line? then name it .jsonl" if error.msg == "Extra data" else ""
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error}){lines}") from None
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a JSON list of conversations, found {excerpt(records)}")
    yield from ((f"{path}, item {number}", record) for number, record in enumerate(records, 1))


def _read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file with their ends, all of them "\\n"; a last character that was cut off is "\\ufffd"."""
    try:
        with _OPENED.get(path.suffix, open)(path, "rb") as file:
            # A byte order mark is no text.
            decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
            rest = []  # of a line whose end has not come
            while content := file.read(2**20):
                first, *others = decoder.decode(content).split("\n")
                rest.append(first)
                if others:
                    yield "".join(rest) + "\n"
                    yield from (line + "\n" for line in others[:-1])
                    rest = others[-1:]
            if last := "".join([*rest, _end_of(decoder)]):
                yield last
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"the data file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the data file {path} is not UTF-8 text: {error}") from None


def _end_of(decoder) -> str:
    """The last characters of a decoder."""
    try:
        return decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise
        return "\ufffd"  # cut within a character


def _open_zstd(path, mode):
    try:
        import zstandard
    except ImportError:
        raise ValueError("files that end in .zst need the `zstandard` library (pip install zstandard)") from None
    return _Zstd(zstandard, path)


class _Zstd:
    """A file of zstd frames, to read from."""

    def __init__(self, zstandard, path):
        self._error, self._file = zstandard.ZstdError, path.open("rb")
        self._stream = zstandard.ZstdDecompressor().stream_reader(self._file, read_across_frames=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def read(self, size):
        try:
            return self._stream.read(size)
        except self._error as error:
            raise OSError(f"no zstd file ({error})") from None


_OPENED = {".gz": gzip.open, ".zst": _open_zstd}  # by the suffix of a compressed file


def _read_dataset(data: str, path: Path, split: str) -> Iterable[tuple[str, object]]:
    return ((f"{data}, row {number}", row) for number, row in enumerate(_dataset(data, path, split), 1))


def _dataset(data: str, path: Path, split: str):
    """The rows of a split (datasets.Dataset)."""
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
    return rows


def excerpt(value, limit: int = 400) -> str:
    """The beginning of a value as JSON, for messages."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def write_conversations(path: Path, conversations: list[list[dict]]) -> None:
    """Write conversations as JSONL that `load_conversations` reads (aside, then renamed)."""
    lines = []
    for messages in conversations:
        of_all = {name: messages[0][name] for name in ("tools", "set") if name in messages[0]}
        messages = [{name: value for name, value in one.items() if name not in of_all} for one in messages]
        lines.append(json.dumps({"messages": messages, **of_all}, ensure_ascii=False))
    write_whole(path, "\n".join(lines) + "\n")
