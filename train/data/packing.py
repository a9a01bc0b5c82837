"""Pack whole documents into rows of one length, and make the mask that keeps attention inside each document."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PackedRows:
    """R rows of T tokens. Padding has document id -1, position 0 and is not supervised."""

    input_ids: torch.Tensor  # [R, T] int64
    position_ids: torch.Tensor  # [R, T] int64, restarting in every document
    document_ids: torch.Tensor  # [R, T] int64: the document's index in the input of `pack`, -1 on padding
    supervised: torch.Tensor  # [R, T] bool
    num_cut: int = 0  # documents that were longer than a row and lost their end


def pack(encoded: Sequence[tuple[Sequence[int], Sequence[bool]]], length: int, pad_token_id: int = 0) -> PackedRows:
    """Fill rows of `length` tokens with whole documents; each goes to the row where it leaves the least room (best fit).

    No document is spread over two rows: a document longer than a row keeps its first `length` tokens, loses the rest, and
    counts in `num_cut`. Documents keep their order as far as they fit; the result depends only on the input.
    Raises ValueError for a length below 2, and if there is no document.
    """
    if length < 2:
        raise ValueError(f"length {length} is too short for a row: a label needs a token before it, so at least 2")
    rows = _best_fit([min(len(ids), length) for ids, _ in encoded], length)
    if not rows:
        raise ValueError("there is nothing to pack: no document has a token")
    order = np.concatenate(rows)  # documents in the order of the rows
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
