"""States of far chunks: by value against the dense formula, for requests that have none, some and many of them."""

import pytest
import torch

from headstart.kernels.attention import far_chunks
from headstart.kernels.attention.attention_fold import PAGE, AttentionOptions
from headstart.kernels.attention.far_chunks import far_states
from headstart.tests.kernels.mutants import mutated

HQ, HK, DIM, NODES = 4, 2, 16, 3
LENGTHS = [2047, 2111, 2112, 0, 2560 + 64, 2900, 5]  # none, none, one tile, none, two chunks, two, none


def check(find, device, window):
    """Each state's mean of the values and its maximum plus log2(sum), where a request has the chunk."""
    dtype, pages = torch.float32 if device == "cpu" else torch.bfloat16, 46
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, (len(LENGTHS) * pages + 1) * HK * PAGE, DIM, generator=generator).to(device, dtype)
    q = torch.randn(len(LENGTHS), NODES, HQ, DIM, generator=generator).to(device, dtype)
    order = torch.randperm(len(LENGTHS) * pages, generator=generator) + 1
    table = order.view(len(LENGTHS), pages).to(device)
    stats, states = find(q, kv, table, torch.tensor(LENGTHS, device=device), HK, AttentionOptions(window=window))
    groups, seen = HQ // HK, 0
    for b, length in enumerate(LENGTHS):
        k, v = kv.view(2, -1, HK, PAGE, DIM)[:, table[b]].transpose(2, 3).flatten(1, 2).double()  # [places, HK, D]
        for chunk, first in enumerate(range(2048, length // 64 * 64, 512)):
            last = min(first + 512, length // 64 * 64)
            for h in range(HK):
                rows = q[b, :, h * groups : (h + 1) * groups].double().flatten(0, 1)  # node by node
                scores = rows @ k[first:last, h].T * DIM**-0.5 / torch.log(torch.tensor(2.0))
                node = torch.arange(NODES, device=device).repeat_interleave(groups)[:, None]
                place = torch.arange(first, last, device=device)
                if window is not None:
                    scores = scores.masked_fill(place <= length + node - window, -torch.inf)
                visible = scores.isfinite().any(1)
                m, total = stats[b, h, chunk].double().unbind(-1)
                mean = (states[b, h, chunk].double() / total[:, None])[visible]
                torch.testing.assert_close(
                    mean, (scores[visible] * 0.6931471805599453).softmax(1) @ v[first:last, h], atol=4e-3, rtol=0
                )
                whole = torch.log2(torch.exp2(scores - scores.amax(1, True)).sum(1)) + scores.amax(1)
                torch.testing.assert_close((m + total.log2())[visible], whole[visible], atol=4e-3, rtol=0)
                seen += int(visible.sum())
    assert seen == (5 * HK * NODES * groups if window is None else 4 * HK * NODES * groups)
    assert stats.shape[2] == states.shape[2] == 2


@pytest.mark.parametrize("window", [None, 300])
def test_states(kernel_device, window):
    check(far_states, kernel_device, window)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("before", "after", "window"),
    [
        ("chunk_at(tails * 64) - first_chunks + 1, 0)", "chunk_at(tails * 64) - first_chunks, 0)", None),
        ("tl.minimum(chunk_start(c + 1) // 64, tail)", "tl.minimum(chunk_start(c + 1) // 64, tail + 1)", None),
        ("c = open_chunk - (place", "c = open_chunk - 0 * (place", None),
        ("r // G - window + 1", "r // G - window", 300),
    ],
    ids=["the last chunk left out", "the tile of L too", "the open chunk for all", "a window too long"],
)
def test_the_check_fails_on_faults(before, after, window, tmp_path):
    mutant = mutated(far_chunks, before, after, tmp_path)
    with pytest.raises(AssertionError):
        check(mutant.far_states, "cpu", window)
