"""Encoded conversations, one after the other: five bytes a token, in memory or in files that all processes of a machine share.

    documents = Documents.of((ids, supervised) for ...)
    ids, supervised = documents[7]          # lists

Letters: D documents, N tokens of all.
"""

from array import array
from collections.abc import Sequence

import numpy as np


class Documents(Sequence):
    """tokens: int32 [N]; supervised: bool [N]; starts, lengths: int64 [D], where each document lies, in any order

    folder: that of a DocumentStore which holds exactly these, or None
    """

    def __init__(self, tokens, supervised, starts, lengths, folder=None):
        self.tokens, self.supervised, self.starts, self.lengths = tokens, supervised, starts, lengths
        self.folder = folder

    @classmethod
    def of(cls, pairs):
        """The documents of an iterable of (ids, supervised), which are equally long."""
        collected = Collected()
        for ids, supervised in pairs:
            collected.append(ids, supervised)
        return collected.documents()

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        """(ids, supervised), two lists; of a slice, Documents that share the memory"""
        if isinstance(index, slice):
            return self.take(index)
        here = slice(self.starts[index], self.starts[index] + self.lengths[index])
        return self.tokens[here].tolist(), self.supervised[here].tolist()

    def __eq__(self, other):
        return len(self) == len(other) and all(one == tuple(two) for one, two in zip(self, other))

    def take(self, index):
        """These documents, in this order, which share the memory.  index: a slice, or numbers of documents"""
        return Documents(self.tokens, self.supervised, self.starts[index], self.lengths[index])

    def holds(self, ids):
        """Whether one of the documents has exactly these tokens."""
        alike = self.starts[self.lengths == len(ids)]
        return any(np.array_equal(self.tokens[start : start + len(ids)], ids) for start in alike.tolist())

    def all_supervised(self):
        """The same with every token supervised."""
        return Documents(self.tokens, np.broadcast_to(True, self.supervised.shape), self.starts, self.lengths)

    def count_supervised(self, begin, end, at_once=2**24):
        """Supervised tokens of each document from its place `begin` to `end`, exclusive.  -> int64 [D]"""
        counts, order = np.zeros(len(self), dtype=np.int64), np.argsort(self.starts, kind="stable")
        starts, stops = self.starts[order], (self.starts + self.lengths)[order]
        first = 0
        while first < len(order):  # blocks of documents that lie side by side
            last = max(int(np.searchsorted(stops, starts[first] + at_once)), first + 1)
            until = np.cumsum(self.supervised[starts[first] : stops[last - 1]], dtype=np.int64)
            until = np.concatenate([[0], until])  # [tokens of the block + 1]
            here, ends = starts[first:last] - starts[first], stops[first:last] - starts[first]
            ends = np.minimum(here + end, ends)
            counts[order[first:last]] = until[ends] - until[np.minimum(here + begin, ends)]
            first = last
        return counts


class Collected:
    """Documents that are still being encoded."""

    def __init__(self):
        self._tokens, self._supervised, self._lengths = array("i"), bytearray(), array("q")

    def __len__(self):
        return len(self._lengths)

    def append(self, ids, supervised):
        """Add a document."""
        self._tokens.extend(ids)
        self._supervised.extend(supervised)
        self._lengths.append(len(ids))

    def extend(self, documents):
        """Add Documents, which lie one after the other."""
        self._tokens.frombytes(documents.tokens.tobytes())
        self._supervised += documents.supervised.tobytes()
        self._lengths.frombytes(documents.lengths.tobytes())

    def documents(self):
        """Documents of what was added; nothing can be added any more."""

        def view(buffer, dtype):
            return np.frombuffer(buffer, dtype) if len(buffer) else np.zeros(0, dtype)

        lengths = view(self._lengths, np.int64)
        return Documents(
            view(self._tokens, np.int32), view(self._supervised, bool), np.cumsum(lengths) - lengths, lengths
        )
