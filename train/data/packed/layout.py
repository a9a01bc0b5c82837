"""Which documents stand in which row, and the labels of each row: worked out once for the documents of a store, then read.

    rows, labels = laid_out(documents, row_length, pad_token_id)     # DocumentRows, int64 [R]

Both take a pass over all documents: 5 seconds for 524 million tokens. They lie beside the documents, which never change.
"""

import contextlib
import zipfile

import numpy as np

from ....heads.storage.atomic_write import staged_file
from .packing import LAYOUT, DocumentRows, lay_out

KEPT = ("order", "starts", "labels")


def laid_out(documents, row_length, pad_token_id):
    """The rows of Documents (packing.py), and the labels of each.  -> DocumentRows, int64 [R]"""
    folder = getattr(documents, "folder", None)
    path = folder and folder / f"layout-{LAYOUT}-{row_length}.npz"
    found = _read(path, len(documents)) if path else None
    if found is None:
        rows = lay_out(documents, row_length, pad_token_id)
        labels = rows.count_labels()
        if path:
            _write(path, dict(order=rows.order, starts=rows.starts, labels=labels))
        return rows, labels
    order, starts, labels = found
    num_cut = int((documents.lengths > row_length).sum())
    return DocumentRows(documents, order, starts, row_length, pad_token_id, num_cut=num_cut), labels


def _read(path, num_documents):
    """The arrays of a file; None if it is not there, or damaged."""
    with contextlib.suppress(OSError, EOFError, ValueError, LookupError, zipfile.BadZipFile), np.load(path) as file:
        order, starts, labels = (file[name] for name in KEPT)
        if order.max(initial=0) < num_documents and starts[-1] == len(order) and len(labels) == len(starts) - 1:
            return order, starts, labels
    return None


def _write(path, arrays):
    with contextlib.suppress(OSError), staged_file(path) as file:  # a folder that others may only read, a full disk
        np.savez(file, **arrays)
