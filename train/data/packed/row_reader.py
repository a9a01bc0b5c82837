"""Rows of a micro-batch with their labels and cached features; a thread reads those of the next one ahead.

    with RowReader(packed, num_depths, device) as reader:
        inputs, labels, features = reader.read(index, following=next_index)

Rows are composed beside a step, not in it. Labels are found on the host, so nothing waits for the device to count them.

Letters: B rows, T tokens per row.
"""

from concurrent import futures
from contextlib import nullcontext

import numpy as np
import torch

from ...loss.distillation import Labels, find_labels


class RowReader:
    """Reads rows as they are asked for, and ahead as they are announced.

    packed: rows of build_rows; num_depths: of the Labels; device: where the tensors are wanted; cache: a FeatureCache of these
    rows, or None, to be set before the first `read`
    """

    def __init__(self, packed, num_depths, device):
        self.packed, self.num_depths, self.device = packed, num_depths, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu and self.device.index is None:  # another thread's current device is another
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.thread = futures.ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.cache = None
        self.ahead = None  # (index, future) of what the thread reads

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.thread.shutdown(cancel_futures=True)

    def read(self, index, following=None):
        """Rows `index` [B].  -> ([input_ids, position_ids, document_ids], [B, T] each; Labels; cached features or None)

        following: the rows that will be read next, if any. Raises what reading `index` raised, also if that was earlier.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is not None and np.array_equal(ahead[0], index):
            tensors, kept = ahead[1].result()
        else:
            tensors, kept = self._make(index)
        if following is not None:
            self.ahead = following, self.thread.submit(self._make, following)
        *inputs, positions, tokens, valid = (one.to(self.device, non_blocking=True) for one in tensors)
        features = self.cache.features(kept, self.device) if self.cache else None
        return inputs, Labels(positions, tokens, valid), features

    def wait(self):
        """Wait until nothing is being read: while a CUDA graph is captured, no other thread may take memory that is pinned."""
        if self.ahead is not None:
            futures.wait([self.ahead[1]])

    def _make(self, index):
        """(tensors of these rows and labels, what the cache keeps of them) on the host, for a GPU in pinned memory."""
        rows = self.packed.select(index)
        labels = find_labels(rows.input_ids, rows.document_ids, rows.supervised, self.num_depths)
        made = rows.input_ids, rows.position_ids, rows.document_ids, labels.positions, labels.tokens, labels.valid
        with torch.cuda.device(self.device) if self.on_gpu else nullcontext():
            kept = self.cache.read(index, pinned=self.on_gpu) if self.cache else None
            return [one.pin_memory() if self.on_gpu else one for one in made], kept
