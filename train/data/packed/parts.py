"""Encoded batches of large data on their way to a store: on disk, so that little is in memory and a killed run goes on.

    parts = Parts(folder)
    parts.save(7, batch)             # an EncodedBatch
    batch = parts.load(7)            # None if it is not there, or damaged
    documents = parts.documents(12)  # of batches 0 to 11: Documents in files of the folder

Letters: D documents.
"""

import contextlib
import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ....heads.storage.atomic_write import staged_file
from .documents import Documents


class NotWritten(ValueError):
    """Packed data cannot be written. What has been encoded so far is kept."""


@contextlib.contextmanager
def writing():
    """OSErrors in here become NotWritten, which says what to do."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"the packed data cannot be written ({error}): make room and start again, which goes on here, or name another folder "
            "with --packed_data; with --packed_data memory every process packs its own"
        ) from error


KINDS = {"tokens": np.int32, "supervised": bool, "lengths": np.int64}


@dataclass
class Seen:
    """What encoded conversations showed, for notes."""

    with_tools: int = 0
    thoughts: int = 0
    unwritten: int = 0  # of the thoughts
    ends: int = 0  # of answers that were not cut off, without a supervised end token
    has_end: bool = False  # whether any end token is supervised
    after: dict = field(default_factory=dict)  # {special token after such an answer, or -1: how often}
    long: int = 0  # documents longer than a row, if they are split
    pieces: int = 0  # what became of them

    def update(self, other):
        """Add what another one showed."""
        for name in ("with_tools", "thoughts", "unwritten", "ends", "long", "pieces"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.has_end |= other.has_end
        for token, count in other.after.items():
            self.after[token] = self.after.get(token, 0) + count


@dataclass
class EncodedBatch:
    """count: conversations of the batch; documents: of those that are encoded, one after the other; places: int64 [D], theirs in
    the batch; left_out: [(kind, text)] of the others; seen: what they showed"""

    count: int
    documents: Documents
    places: np.ndarray
    left_out: list
    seen: Seen


class Parts:
    """folder: is made; nothing else lies there. Raises NotWritten."""

    def __init__(self, folder):
        self.folder = Path(folder)
        with writing():
            self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, number, batch):
        """Keep the batch of this number, whole or not at all."""
        told = {"count": batch.count, "left_out": batch.left_out, "seen": asdict(batch.seen)}
        told["seen"]["after"] = list(batch.seen.after.items())
        documents = {name: getattr(batch.documents, name) for name in KINDS}
        with writing(), staged_file(self._path(number)) as file:
            np.savez(file, told=np.frombuffer(json.dumps(told).encode(), np.uint8), places=batch.places, **documents)

    def load(self, number):
        """The EncodedBatch of this number; None if it is not there, or damaged."""
        if not self._path(number).exists():
            return None
        with (
            contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self._path(number)) as file,
        ):
            told = json.loads(file["told"].tobytes())
            tokens, supervised, lengths = (file[name] for name in KINDS)
            seen = Seen(**told["seen"] | {"after": dict(map(tuple, told["seen"]["after"]))})
            documents = Documents(tokens, supervised, np.cumsum(lengths) - lengths, lengths)
            left_out = [tuple(one) for one in told["left_out"]]
            return EncodedBatch(told["count"], documents, file["places"], left_out, seen)

    def documents(self, count):
        """The Documents of the first `count` batches, which lie in files of the folder."""
        lengths = np.concatenate([np.zeros(0, np.int64), *(self._read(number, "lengths") for number in range(count))])
        files = {}
        for name in ("tokens", "supervised"):
            files[name] = self.folder / f"{name}.npy"
            with writing(), staged_file(files[name]) as file:
                header = {"descr": np.lib.format.dtype_to_descr(np.dtype(KINDS[name])), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, header | {"shape": (int(lengths.sum()),)})
                for number in range(count):
                    file.write(self._read(number, name).tobytes())
        tokens, supervised = (np.load(path, mmap_mode="r" if lengths.any() else None) for path in files.values())
        return Documents(tokens, supervised, np.cumsum(lengths) - lengths, lengths)

    def _read(self, number, name):
        with np.load(self._path(number)) as file:
            return file[name]

    def _path(self, number):
        return self.folder / f"batch-{number:06d}.npz"
