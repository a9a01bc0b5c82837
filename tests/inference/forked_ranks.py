"""Ranks of a gloo group as forks of this process, which cost no start of Python."""

import multiprocessing
import tempfile
import traceback

import pytest
import torch

from headstart.inference.models.transport import GlooRanks


def on_ranks(size, work, *given):
    """[work(ranks, *given)] of all ranks, which must be picklable: tensors as bytes, not as handles of shared memory."""
    if torch.cuda.is_available():
        pytest.skip("forks, which CUDA does not survive")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_run, args=(folder, rank, size, pipes[rank][1], work, given), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        results = []
        for ours, _ in pipes:
            assert ours.poll(60), "a rank does not end"
            results.append(ours.recv())
        for process in processes:
            process.join()
    failed = [result for result in results if isinstance(result, str)]
    assert not failed, failed[0]
    return results


def _run(folder, rank, size, pipe, work, given):
    torch.set_num_threads(1)
    try:
        pipe.send(work(GlooRanks(folder, rank, size), *given))
    except BaseException:
        pipe.send(traceback.format_exc())
