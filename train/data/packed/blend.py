"""Several data sets as one: their documents, and rows of which each set gives its share of an epoch.

An epoch has as many rows as all sets together. A set gives its share of them: a larger one goes on in the next epoch where it
stopped, a smaller one is repeated. A row holds documents of one set.

Letters: S sets, R rows of all sets, T tokens per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .packing import BLOCK_TOKENS, DocumentRows, PackedRows, numbers_of


class BlendedDocuments:
    """sets: Documents of each set; names: of them; weights: floats, or None for each (a set then gives all its rows)"""

    def __init__(self, sets, names, weights):
        self.sets, self.names, self.weights = sets, names, weights

    def __len__(self):
        return sum(map(len, self.sets))

    def __iter__(self) -> Iterator[tuple[list[int], list[bool]]]:
        for documents in self.sets:
            yield from documents

    def all_supervised(self):
        """The same with every token supervised."""
        return BlendedDocuments([one.all_supervised() for one in self.sets], self.names, self.weights)


def rows_per_epoch(sizes, weights):
    """Rows that each set gives to an epoch, sum(sizes) in all.  -> int64 [S]

    sizes: rows of the sets; weights: floats, or None for each
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if None in weights:
        return sizes
    exact = np.asarray(weights) / sum(weights) * sizes.sum()
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")  # the largest remainders first
    counts[most[: sizes.sum() - counts.sum()]] += 1
    return counts


def weighted_blocks(packed):
    """Pairs (PackedRows, how often an epoch passes their set): all rows of any kind, a few at a time."""
    if not isinstance(packed, BlendedRows):
        yield from ((some, 1) for some in packed.blocks())
        return
    for part, count in zip(packed.parts, packed.counts.tolist()):
        yield from ((some, count / len(part)) for some in part.blocks())


@dataclass(frozen=True)
class BlendedRows:
    """The rows of several sets, one set after the other, as DocumentRows has those of one.

    parts: DocumentRows of each set; counts: int64 [S], rows that each gives to an epoch, R in all
    """

    parts: list[DocumentRows]
    counts: np.ndarray

    def __len__(self):
        return int(self._starts[-1])

    @property
    def row_length(self):
        """T."""
        return self.parts[0].row_length

    @property
    def _starts(self):
        """Where the rows of each set begin, and end.  -> int64 [S + 1]"""
        return np.cumsum([0, *map(len, self.parts)])

    def rows_of_epoch(self, epoch):
        """The rows of an epoch (from 0), one set after the other.  -> int64 [R]"""
        given = [
            start + (epoch * count + np.arange(count)) % len(part)
            for part, start, count in zip(self.parts, self._starts, self.counts)
        ]
        return np.concatenate(given)

    def select(self, index):
        """PackedRows of these rows.  index: a slice, or numbers of rows"""
        rows, part_of = self._parts_of(index)
        selected, places, before = [], [], 0
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(part_of == number)
            if len(here):
                some = part.select(rows[here] - self._starts[number])
                ids = some.document_ids  # documents are numbered over all sets
                selected.append((some.input_ids, some.position_ids, ids.where(ids < 0, ids + before), some.supervised))
                places.append(here)
            before += len(part.documents)
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        return PackedRows(*(torch.cat(tensors)[back] for tensors in zip(*selected)))

    def blocks(self):
        """All rows, in order, a few at a time (PackedRows)."""
        size = max(BLOCK_TOKENS // self.row_length, 1)
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))

    def count_tokens(self, index):
        """Tokens of these rows together, padding left out."""
        rows, part_of = self._parts_of(index)
        return sum(
            part.count_tokens(rows[part_of == number] - self._starts[number]) for number, part in enumerate(self.parts)
        )

    def _parts_of(self, index):
        """(rows of an index, the set of each).  -> int64 [B] each"""
        rows = numbers_of(index, len(self))
        return rows, np.searchsorted(self._starts, rows, side="right") - 1

    def busiest(self):
        """The row with the most documents, and that with the longest one."""
        documents = np.concatenate([np.diff(part.starts) for part in self.parts])
        longest = np.concatenate([part.longest_per_row() for part in self.parts])
        return int(documents.argmax()), int(longest.argmax())
