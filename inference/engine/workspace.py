"""Memory that prompts and steps take on a GPU besides weights and cache: measured before the cache is sized."""

import torch

from ...kernels.attention.tree_attention import PAGE
from .logprobs import score_hidden
from .sampling import CUT, NO_FILTERS


@torch.no_grad()
def measure_workspace(engine, num_tokens):
    """Bytes that a prefill of `num_tokens` and a step of all slots need besides weights and cache.

    Everything runs for nobody, on page 0. Prompts of other lengths are tried too: the first of each kind compiles kernels, and
    should not do so while somebody waits.
    """
    device = engine.decoder.device
    num_tokens = max(1, min(num_tokens, (engine.slots.block_table.shape[1] - 1) * PAGE))
    before = torch.cuda.memory_allocated(device)
    for count in [*(n for n in (1, 20, 40, 100, 200, 300) if n < num_tokens), num_tokens]:
        torch.cuda.reset_peak_memory_stats(device)
        hidden = engine.prompts.run_for_nobody(count)
    score_hidden(engine.decoder, hidden, torch.zeros(num_tokens, dtype=torch.int64, device=device), 1)
    prefill = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    for filters in (NO_FILTERS, CUT):
        engine.graphs.step(engine.slots.on_device([engine.slots.nobody] * engine.graphs.sizes[-1]), filters)
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # The graphs keep a pool of their own beside what prefill takes from the allocator. Each of them holds what its step leaves
    # behind; over all sizes that is twice the largest, for each kind of filters.
    rows, own = engine.graphs.sizes[-1] * engine.tree.num_nodes, engine.decoder.dtype.itemsize
    all_rows = engine.graphs.sizes[-1] * sum(one.tree.num_nodes for one in engine.graphs.steps)
    held = all_rows * engine.decoder.vocab_size * 5 * (own + (4 if engine.graphs.step.keep_scores else 0))
    # Until a request needs one of the tables that change logits, no step holds its changed scores.
    changed = (rows + engine.graphs.sizes[-1] * engine.tree.max_depth) * engine.decoder.vocab_size * 4
    return prefill + step + held + changed
