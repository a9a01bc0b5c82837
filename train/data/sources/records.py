"""The records of a data source, one after the other: JSON and JSONL files (.gz and .zst, too), or what `datasets` loads.

conversations.py makes conversations of records.
"""

import codecs
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..stdlib_pairs import installed_pairs, stdlib_pairs

# Sets made from the Python source on this machine, by their name in `data`.
BUILT_IN = {"stdlib": stdlib_pairs, "installed": installed_pairs}


class UnusableRecord(ValueError):
    """A record that cannot be used. kind: its fault, one of a few kinds, for counting."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def records_of(data: str) -> Iterator[tuple[str, object]]:
    """(place, record) of every record of a source that is not built in. What is no record is an UnusableRecord.

    Raises ValueError for a source that does not exist, and for a line that is not JSON.
    """
    name, split = split_of(data)
    for file in files_of(name):
        yield from _records(file, split)


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
    for one in files_of(name):
        path = Path(one).expanduser()
        if path.is_file():
            found = path.stat()
            files.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
        elif _kind(path) in (".json", ".jsonl"):
            return None
        else:
            sets.append([one, _dataset(one, path, split)._fingerprint])
    return {"split": split, "files": files, "sets": sets}


def has_changed(facts: dict) -> bool:
    """Whether a file of source_facts is gone, or not as it was. Where its folder is not there either, nothing is known."""
    for name, size, modified in facts["files"]:
        try:
            found = Path(name).stat()
        except OSError:
            if Path(name).parent.is_dir():
                return True
            continue
        if (found.st_size, found.st_mtime_ns) != (size, modified):
            return True
    return False


def split_of(data: str) -> tuple[str, str]:
    """(name, split) of `data`: "NAME:SPLIT" taken apart; the split is "train" if none is named."""
    name, colon, split = data.rpartition(":")
    return (name, split) if colon and split and not Path(data).expanduser().exists() else (data, "train")


def files_of(name: str) -> list[str]:
    """The names that a pattern stands for, in order; any other name itself."""
    if not is_pattern(name):
        return [name]
    found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))
    if not found:
        raise ValueError(f"no file matches the pattern {name}")
    return found


def _records(name: str, split: str) -> Iterable[tuple[str, object]]:
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


def _read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                what = f"{path}, line {number}: not JSON ({error}): {line[:200]!r}"
                if line.endswith("\n"):
                    raise ValueError(what) from None
                record = UnusableRecord("cut off, the last line of the file", what)  # no line end follows it
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
