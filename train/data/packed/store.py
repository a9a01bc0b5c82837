"""Encoded data on disk: made once, by one process, and mapped by all others, by restarts and by further runs.

    store = DocumentStore(folder, name, facts)     # facts: all that the documents follow from
    documents, held_out = store.load(make, accelerator, note)

    FOLDER/NAME-KEY/tokens.npy, supervised.npy, starts.npy, lengths.npy    Documents, five bytes a token
                    held_out.jsonl                                         conversations to measure on
                    about.json                                             the facts, and what was noted
                    layout-*.npz, rows-*.txt                               of rows that runs made (layout.py; `fingerprint`)

KEY is a hash of the facts, so other data lie beside and nothing is overwritten. A folder is written aside and renamed: one with
that name is whole. Folders that no run reads can be removed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from datetime import date
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import transformers
from accelerate.utils import gather_object

from ....heads.storage.atomic_write import is_partial, staged_folder, write_json
from ..sources.records import has_changed
from .documents import Documents
from .parts import NotWritten, Parts, writing

FORMAT = 1
PARTS = ("tokens", "supervised", "starts", "lengths")
PAUSE = 0.2  # seconds between two looks at a lock
ABANDONED = 30 * 24 * 3600  # seconds after which nobody goes on with a killed packing
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.parts(-(?P<host>.+)-(?P<pid>\d+))?")


def default_folder():
    """Where packed data lie if the user names no folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "headstart", "packed")


def tokenizer_facts(tokenizer):
    """What decides how a tokenizer encodes conversations, as a hash."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    del content["truncation"], content["padding"]  # what it was last called with
    names = ("chat_template", "special_tokens_map", "split_special_tokens")
    content |= {name: str(getattr(tokenizer, name, None)) for name in names}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class DocumentStore:
    """folder: of all packed data; name: of these, for people; facts: a dict of scalars, lists and dicts

    facts["sources"], if it is there, lists what source_facts gives.
    """

    def __init__(self, folder, name, facts):
        versions = {library.__name__: library.__version__ for library in (transformers, tokenizers, jinja2)}
        self.facts = facts | {"format": FORMAT, "versions": versions}
        key = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(folder).expanduser()
        self.path = self.folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-.')[:60]}-{key}"

    def load(self, make, accelerator, note):
        """(Documents, held-out conversations); all ranks call this together.

        make(note, parts=Parts) makes them, on one process of a machine, if they are not there; after a kill it finds its parts
        again. note(text) is told what making noted, also where they were there already. Raises ValueError if they cannot be written
        or read.
        """
        error = None
        if accelerator.is_local_main_process:
            try:
                self._make(make, note)
            except ValueError as found:
                error = found
        told = [one for one in gather_object([error and str(error)]) if one]  # all ranks end with an error, or none
        if told:
            raise error or ValueError(told[0])
        return self._read()

    def _make(self, make, note):
        if self._is_there():
            self._tell(note)
            return
        with self._locked(note) as alone:
            if self._is_there():  # made by the process that was waited for
                self._tell(note)
                return
            # Without locks another process may be writing, too: parts of its own.
            own = "" if alone else f"-{socket.gethostname()}-{os.getpid()}"
            noted, folder = [], self.folder / f".{self.path.name}.parts{own}"
            self._forget_others(folder)
            parts = Parts(folder)
            with writing():
                write_json(folder / "sources.json", self.facts.get("sources", []))
            try:
                documents, held_out = make(lambda text: (noted.append(text), note(text)), parts=parts)
                self._write(documents, held_out, noted)
            except NotWritten:
                raise
            except ValueError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
            note(f"the data are packed: {_gib(self._size(documents))} in {self.path}")

    def _is_there(self):
        """Whether they are packed already. The folder is listed: network file systems remember which names were missing."""
        return self.folder.is_dir() and self.path.name in os.listdir(self.folder)

    def _write(self, documents, held_out, noted):
        arrays = [getattr(documents, name) for name in PARTS]
        needed = sum(array.nbytes for array in arrays if not _lies_in_a_file(array))
        about = {
            "facts": self.facts,
            "noted": noted,
            "made": date.today().isoformat(),
            "documents": len(documents),
            "tokens": int(documents.lengths.sum()),
        }
        with writing():
            if needed > (free := shutil.disk_usage(self.folder).free):
                raise OSError(f"they take {_gib(needed)}, and {self.folder} has {_gib(free)} left")
            try:
                with staged_folder(self.path) as staging:
                    for name, array in zip(PARTS, arrays, strict=True):
                        _put(array, staging / f"{name}.npy")
                    lines = [json.dumps(conversation) + "\n" for conversation in held_out]
                    (staging / "held_out.jsonl").write_text("".join(lines), encoding="utf-8")
                    (staging / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            except (OSError, ValueError):
                if not self._is_there():  # if it is, another process was sooner
                    raise

    def _read(self):
        try:
            arrays = (np.load(self.path / f"{name}.npy", mmap_mode="r") for name in PARTS)
            documents = Documents(*arrays, folder=self.path)
            lines = (self.path / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
            held_out = [json.loads(line) for line in lines]
            ends = documents.starts + documents.lengths
            if not ends.max(initial=0) <= len(documents.tokens) == len(documents.supervised):
                raise ValueError("its files do not belong together")
        except (OSError, ValueError) as error:
            raise ValueError(f"the packed data in {self.path} are damaged ({error}): remove the folder") from error
        return documents, held_out

    def _tell(self, note):
        try:
            about = json.loads((self.path / "about.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the packed data in {self.path} are damaged ({error}): remove the folder") from error
        size = f"{about['documents']:,} documents, {about['tokens']:,} tokens"
        note(f"the data were packed on {about['made']}: {size} in {self.path}")
        for text in about["noted"]:
            note(text)

    @contextlib.contextmanager
    def _locked(self, note):
        """One process at a time, if the file system has locks: whether it has."""
        with contextlib.ExitStack() as stack:
            with writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(_lock_file(self.folder, self.path.name))
            told, alone = False, True
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not told:
                        note("another process packs the same data: waiting for it")
                    told = True
                    time.sleep(PAUSE)
                    continue
                except OSError:
                    alone = False
                break
            if alone:
                self._forget_unfinished()
            yield alone

    def _forget_unfinished(self):
        """Remove what processes that were killed have left."""
        for path in self.folder.iterdir():
            if is_partial(path.name) and path.name.startswith(f".{self.path.name}."):
                shutil.rmtree(path, ignore_errors=True)

    def _forget_others(self, own):
        """Remove parts of other data that no process writes, and none will go on with: their data have changed, or are old."""
        for path in self.folder.iterdir():
            found = _UNFINISHED.fullmatch(path.name)
            if not found or path == own:
                continue
            if found["host"]:  # of one process, where there are no locks
                if found["host"] == socket.gethostname() and not _lives(int(found["pid"])):
                    shutil.rmtree(path, ignore_errors=True)
                continue
            with contextlib.suppress(OSError, ValueError):  # of another user; just removed; without sources
                if time.time() - path.stat().st_mtime < ABANDONED:
                    sources = json.loads((path / "sources.json").read_text(encoding="utf-8"))
                    if not any(map(has_changed, filter(None, sources))):
                        continue
                with _lock_file(self.folder, found["name"]) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)

    def _size(self, documents):
        return sum(getattr(documents, name).nbytes for name in PARTS)


@contextlib.contextmanager
def _lock_file(folder, name):
    """The open file whose lock the process that packs `name` holds; it ends with the block."""
    lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield lock
    finally:
        os.close(lock)


def _lives(pid):
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _lies_in_a_file(array):
    """Whether an array is all of a .npy file, which can be linked."""
    return isinstance(array, np.memmap) and array.offset + array.nbytes == os.path.getsize(array.filename)


def _put(array, path):
    """Write an array; one that lies in a file beside is linked."""
    if _lies_in_a_file(array):
        with contextlib.suppress(OSError):
            os.link(array.filename, path)
            return
    np.save(path, array)


def _gib(count):
    return f"{count / 2**30:.2f} GiB"
