"""Processes that encode batches of conversations, in order: as many as the cores, for large data."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice


def num_workers():
    """Processes that encode large data: as many as the cores that this one may use, 16 at most, and none beside a single core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16) if cores > 1 else 0


def batches_of(conversations, size):
    """Lists of `size` conversations, one after the other."""
    conversations = iter(conversations)
    while batch := list(islice(conversations, size)):
        yield batch


def encode_batches(encoder, batches, workers, parts):
    """The EncodedBatch of each batch, in order; new ones are kept in `parts`, if that is given.

    encoder: has encode_batch(batch); workers: processes that encode (0: this one), with the same result; parts: Parts, or None
    """
    with contextlib.ExitStack() as stack:
        encode, waiting = _encode_here(encoder), deque()
        if given := _pickled(encoder) if workers else None:
            # Clean processes: this one may hold a GPU, and threads.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, context, _start_worker, (given,))
            stack.callback(pool.shutdown, cancel_futures=True)
            encode = functools.partial(pool.submit, _encode_in_worker)

        def finished():
            number, kept, future = waiting.popleft()
            if kept:
                return kept
            batch = future.result()
            if parts:
                parts.save(number, batch)
            return batch

        for number, batch in enumerate(batches):
            kept = parts and parts.load(number)
            if kept and kept.count != len(batch):
                kept = None
            waiting.append((number, kept, None if kept else encode(batch)))
            if len(waiting) > 2 * workers:
                yield finished()
        while waiting:
            yield finished()


def _encode_here(encoder):
    """Encode a batch in this process, as an executor does it.  -> a function of the batch that gives a Future"""

    def encode(batch):
        future = Future()
        future.set_result(encoder.encode_batch(batch))
        return future

    return encode


def _pickled(encoder):
    """The encoder for another process; None if its tokenizer, of code of its own, cannot be sent there."""
    try:
        return pickle.dumps(encoder)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _start_worker(encoder):
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one answers it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    _encoder = pickle.loads(encoder)


def _end_with_parent():
    """A worker whose parent was killed would wait for batches for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_in_worker(batch):
    return _encoder.encode_batch(batch)
