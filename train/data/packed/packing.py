"""Pack whole documents into rows of one length, and make the mask that keeps attention inside each document.

    rows = lay_out(documents, length)       # which documents stand in which row: nothing is copied
    some = rows.select([3, 17])             # PackedRows of two rows

Letters: D documents, R rows, T tokens per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .documents import Documents

LAYOUT = 1  # to be raised when `lay_out` gives other rows of the same documents, or rows have other labels
BLOCK_TOKENS = 2**22  # of the rows that are made at once where all are read


@dataclass(frozen=True)
class PackedRows:
    """R rows of T tokens. Padding has document id -1, position 0 and is not supervised."""

    input_ids: torch.Tensor  # [R, T] int64
    position_ids: torch.Tensor  # [R, T] int64, restarting in every document
    document_ids: torch.Tensor  # [R, T] int64: the document's index in the input of `lay_out`, -1 on padding
    supervised: torch.Tensor  # [R, T] bool
    num_cut: int = 0  # documents that were longer than a row and lost their end

    def __len__(self):
        return len(self.input_ids)

    @property
    def row_length(self):
        """T."""
        return self.input_ids.shape[1]

    def select(self, index):
        """These rows.  index: a slice, or numbers of rows"""
        index = index if isinstance(index, slice) else torch.as_tensor(index)
        parts = self.input_ids, self.position_ids, self.document_ids, self.supervised
        return PackedRows(*(part[index] for part in parts))

    def blocks(self):
        """All rows, in order, a few at a time (PackedRows)."""
        yield self

    def count_tokens(self, index):
        """Tokens of these rows together, padding left out."""
        return int((self.document_ids[index] >= 0).sum())


@dataclass(frozen=True)
class DocumentRows:
    """The rows of documents, made when they are asked for."""

    documents: Documents
    order: np.ndarray  # int64 [D]: the documents, row by row; empty ones are left out
    starts: np.ndarray  # int64 [R + 1]: where each row begins in `order`
    row_length: int  # T
    pad_token_id: int = 0
    num_cut: int = field(default=0, kw_only=True)  # documents that are longer than a row and lose their end

    def __len__(self):
        return len(self.starts) - 1

    @property
    def lengths(self):
        """Tokens that each document has in its row.  -> int64 [D], in the documents' own order"""
        return np.minimum(self.documents.lengths, self.row_length)

    def select(self, index):
        """PackedRows of these rows.  index: a slice, or numbers of rows"""
        T, (chosen, counts) = self.row_length, self._documents_in(numbers_of(index, len(self)))
        lengths = np.minimum(self.documents.lengths[chosen], T)
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(len(counts)), counts)
        before = np.concatenate([[0], ends])[np.cumsum(counts) - counts]  # tokens before each row
        begins = row_of * T + (ends - lengths) - before[row_of]  # where each document begins, rows joined
        positions = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        place = torch.from_numpy(np.repeat(begins, lengths) + positions)
        source = np.repeat(self.documents.starts[chosen], lengths) + positions

        def filled(values, empty, dtype):
            flat = torch.full((len(counts) * T,), empty, dtype=dtype)
            flat[place] = torch.from_numpy(values).to(dtype)
            return flat.view(len(counts), T)

        return PackedRows(
            filled(self.documents.tokens[source], self.pad_token_id, torch.int64),
            filled(positions, 0, torch.int64),
            filled(np.repeat(chosen, lengths), -1, torch.int64),
            filled(self.documents.supervised[source], False, torch.bool),
        )

    def blocks(self):
        """All rows, in order, a few at a time (PackedRows)."""
        size = max(BLOCK_TOKENS // self.row_length, 1)
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))

    def count_tokens(self, index):
        """Tokens of these rows together, padding left out. It looks at their documents alone."""
        chosen, _ = self._documents_in(numbers_of(index, len(self)))
        return int(np.minimum(self.documents.lengths[chosen], self.row_length).sum())

    def _documents_in(self, rows):
        """(the documents of these rows, one after the other; how many each row has).  rows, counts: int64 [B]"""
        first, counts = self.starts[rows], self.starts[rows + 1] - self.starts[rows]
        places = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return self.order[places], counts

    def longest_per_row(self):
        """Tokens of the longest document of each row.  -> int64 [R]"""
        return np.maximum.reduceat(self.lengths[self.order], self.starts[:-1])

    def rows_of_epoch(self, epoch):
        """The rows of an epoch: all.  -> int64 [R]"""
        return np.arange(len(self))

    def count_labels(self):
        """Labels of each row: supervised tokens with a token two places before in their document.  -> int64 [R]"""
        return self._sums(self.documents.count_supervised(2, self.row_length))

    def keep(self, kept):
        """The rows for which kept [R] is true."""
        counts = np.diff(self.starts)
        starts = np.concatenate([[0], np.cumsum(counts[kept])])
        return replace(self, order=self.order[np.repeat(kept, counts)], starts=starts)

    def busiest(self):
        """The row with the most documents, and that with the longest one."""
        return int(np.diff(self.starts).argmax()), int(self.longest_per_row().argmax())

    def _sums(self, values):
        """Sums over the documents of each row.  values [D] -> [R]"""
        return np.add.reduceat(values[self.order], self.starts[:-1])


def numbers_of(index, num_rows):
    """The rows of an index: a slice, or numbers of rows from 0.  -> int64 [B]"""
    return np.arange(*index.indices(num_rows)) if isinstance(index, slice) else np.asarray(index, dtype=np.int64)


def lay_out(
    documents: Sequence[tuple[Sequence[int], Sequence[bool]]], length: int, pad_token_id: int = 0
) -> DocumentRows:
    """Fill rows of `length` tokens with whole documents; each goes to the row where it leaves the least room (best fit).

    No document is spread over two rows: a document longer than a row keeps its first `length` tokens, loses the rest, and
    counts in `num_cut`. Documents keep their order as far as they fit; the result depends only on the input.
    Raises ValueError for a length below 2, and if there is no document.
    """
    if length < 2:
        raise ValueError(f"length {length} is too short for a row: a label needs a token before it, so at least 2")
    documents = documents if isinstance(documents, Documents) else Documents.of(documents)
    row_of = _best_fit(np.minimum(documents.lengths, length).tolist(), length)
    order = np.argsort(row_of, kind="stable")
    order = order[np.searchsorted(row_of[order], 0) :]  # those that have a row
    if not len(order):
        raise ValueError("there is nothing to pack: no document has a token")
    starts = np.searchsorted(row_of[order], np.arange(row_of[order[-1]] + 2))
    num_cut = int((documents.lengths > length).sum())
    return DocumentRows(documents, order, starts, length, pad_token_id, num_cut=num_cut)


def pack(encoded: Sequence[tuple[Sequence[int], Sequence[bool]]], length: int, pad_token_id: int = 0) -> PackedRows:
    """All rows of `lay_out` at once."""
    rows = lay_out(encoded, length, pad_token_id)
    return replace(rows.select(slice(None)), num_cut=rows.num_cut)


def block_attention_mask(document_ids: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """[B, T] document ids -> bool [B, 1, T, T], True where the query (third axis) may attend to the key (last axis).

    Causal and inside one document; a padding position attends only to itself, because an empty row would be NaN. For
    models on SDPA attention: transformers' eager attention adds its mask, so it needs a float mask. window: only the last
    `window` keys, the query's own included.
    """
    num_tokens = document_ids.shape[-1]
    same = document_ids[:, :, None] == document_ids[:, None, :]  # [B, T, T]
    real = (document_ids >= 0)[:, :, None]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=document_ids.device).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    itself = torch.eye(num_tokens, dtype=torch.bool, device=document_ids.device)
    return ((same & real & causal) | itself)[:, None]


def _best_fit(lengths: list[int], capacity: int) -> np.ndarray:
    """The row of each document, -1 for empty ones.  lengths: what documents take of a row's capacity  ->  int64 [D]"""
    row_of, num_rows = np.full(len(lengths), -1, dtype=np.int64), 0
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
            room, row = capacity, num_rows
            num_rows += 1
        row_of[index] = row
        if room > length:
            open_rows[room - length].append(row)
            has_room |= 1 << (room - length)
    return row_of
