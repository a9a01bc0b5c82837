"""Encoded conversations, one after the other: five bytes a token, in memory or in files that all processes of a machine share.

    documents = Documents.of((ids, supervised) for ...)
    ids, supervised = documents[7]          # lists

Letters: D documents, N their tokens.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np


class Documents(Sequence):
    """tokens: int32 [N]; supervised: bool [N]; starts: int64 [D + 1], where each document begins, and N"""

    def __init__(self, tokens, supervised, starts):
        self.tokens, self.supervised, self.starts = tokens, supervised, starts

    @classmethod
    def of(cls, pairs):
        """The documents of an iterable of (ids, supervised), which are equally long."""
        collected = Collected()
        for ids, supervised in pairs:
            collected.append(ids, supervised)
        return collected.documents()

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, index):
        """(ids, supervised), two lists; of a slice, Documents that share the memory"""
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("documents are taken one after the other")
            starts = self.starts[first : max(stop, first) + 1]
            here = slice(starts[0], starts[-1])
            return Documents(self.tokens[here], self.supervised[here], starts - starts[0])
        start, end = self.starts[range(len(self))[index]], self.starts[range(len(self))[index] + 1]
        return self.tokens[start:end].tolist(), self.supervised[start:end].tolist()

    def __eq__(self, other):
        return len(self) == len(other) and all(one == tuple(two) for one, two in zip(self, other))

    @property
    def lengths(self):
        """Tokens of each document.  -> int64 [D]"""
        return np.diff(self.starts)

    def all_supervised(self):
        """The same with every token supervised."""
        return Documents(self.tokens, np.broadcast_to(True, self.supervised.shape), self.starts)

    def count_supervised(self, begin, end, at_once=2**24):
        """Supervised tokens of each document from its place `begin` to `end`, exclusive.  -> int64 [D]"""
        counts, block = np.zeros(len(self), dtype=np.int64), [0]
        while block[-1] < len(self):
            block.append(max(int(np.searchsorted(self.starts, self.starts[block[-1]] + at_once)) - 1, block[-1] + 1))
        for first, stop in pairwise(block):
            some = self[first:stop]
            starts, until = some.starts, np.cumsum(some.supervised, dtype=np.int64)
            until = np.concatenate([[0], until])  # [tokens of the block + 1]
            ends = np.minimum(starts[:-1] + end, starts[1:])
            counts[first:stop] = until[ends] - until[np.minimum(starts[:-1] + begin, ends)]
        return counts


class Collected:
    """Documents that are still being encoded."""

    def __init__(self):
        self._tokens, self._supervised, self._lengths = array("i"), bytearray(), array("q", [0])

    def __len__(self):
        return len(self._lengths) - 1

    def append(self, ids, supervised):
        """Add a document."""
        self._tokens.extend(ids)
        self._supervised.extend(supervised)
        self._lengths.append(len(ids))

    def documents(self):
        """Documents of what was added; nothing can be added any more."""
        return Documents(
            np.frombuffer(self._tokens, dtype=np.int32) if self._tokens else np.zeros(0, dtype=np.int32),
            np.frombuffer(self._supervised, dtype=bool) if self._supervised else np.zeros(0, dtype=bool),
            np.cumsum(self._lengths, dtype=np.int64),
        )
