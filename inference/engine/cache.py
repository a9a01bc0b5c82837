"""The paged KV cache: pages of 64 positions, shared by all layers' numbering.

kv [layers, 2, (pages + 1) * HK * 64, D]: keys and values; a page of one layer is [HK, 64, D]. Page 0 belongs to no request:
padding in block tables points to it, so it must stay finite. Its content is never used.
"""

from collections import Counter
from contextlib import nullcontext

import torch

from ...kernels.attention.tree_attention import PAGE
from ..models.memory import free_bytes, in_gib
from ..speculation.verifiers import Ratio
from .logprobs import SCORED_ROWS, WIDTHS, gather_logprobs, score_hidden
from .target_scores import CHANGED, CUT, FILTERED_ROWS, NO_FILTERS

# Share of the free host memory that the cache may take on the CPU.
CPU_SHARE = 0.5


class PagedCache:
    """Keys and values of all layers for `num_pages` pages."""

    def __init__(self, num_pages, num_layers, num_kv_heads, head_dim, dtype, device):
        self.num_pages, self.num_kv_heads = num_pages, num_kv_heads
        rows = (num_pages + 1) * num_kv_heads * PAGE
        # Zeros: new memory may hold NaN, which a masked key's weight of 0 would not remove.
        self.kv = torch.zeros(num_layers, 2, rows, head_dim, dtype=dtype, device=device)


def pages_that_fit(page_bytes, device, wanted, least=2, workspace=0, utilization=0.9):
    """Number of pages to allocate: the `wanted` pages, or as many as memory allows.

    page_bytes: of one page; least: pages of one request of max_model_len; workspace: bytes to leave for activations;
    utilization: share of a GPU's whole memory that weights, workspace and cache may take together. If fewer than `least` pages
    fit, raises ValueError saying what would fit.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = total * utilization - (total - free) - workspace
        where = f"gpu_memory_utilization {utilization} of {total / 2**30:.1f} GiB leaves"
        advice = "raise gpu_memory_utilization, free memory on the GPU"
    else:
        budget = free_bytes(device) * CPU_SHARE
        where, advice = f"half of the free memory of {device} is", "free memory"
    fit = max(0, int(budget // page_bytes) - 1)  # page 0 belongs to the padding seat
    if fit < least:
        raise ValueError(
            f"no memory for the KV cache: one request of max_model_len takes {least} pages of {PAGE} tokens, "
            f"{least * page_bytes / 2**20:.0f} MiB, and {where} {max(0, budget) / 2**20:.0f} MiB, enough for "
            f"max_model_len {max(0, fit - 2) * PAGE}: lower max_model_len, {advice}, or use a smaller model"
        )
    return min(wanted, fit)


def check_pages_fit(page_bytes, device, num_pages):
    """ValueError, saying how many would fit, if a cache of num_pages pages does not fit into the free memory."""
    free = free_bytes(device)
    if (num_pages + 1) * page_bytes > free:
        raise ValueError(
            f"num_gpu_blocks_override={num_pages} pages of {PAGE} tokens take {in_gib((num_pages + 1) * page_bytes)} and "
            f"{in_gib(free)} are free on {device}: at most {max(0, free // page_bytes - 1)} fit, or leave it out"
        )


def bytes_of_page(num_layers, num_kv_heads, head_dim, dtype):
    """Bytes of one page's keys and values in all layers."""
    return num_layers * 2 * num_kv_heads * PAGE * head_dim * dtype.itemsize


@torch.no_grad()
def measure_workspace(engine, num_tokens):
    """Bytes that a prefill of `num_tokens` and a step of all seats need besides weights and cache.

    It runs dummy batches in the seat that no request holds, on page 0. Prompts of other lengths run too, and whatever a request
    may ask for: all kernels are compiled here, because no user should wait for that.
    """
    device, seats = engine.decoder.device, engine.seats
    num_tokens = max(1, min(num_tokens, (engine.seats.block_table.shape[1] - 1) * PAGE))
    before = torch.cuda.memory_allocated(device)
    counts = {*engine.decoder.row_counts(num_tokens), *engine.drafter.row_counts(num_tokens)}
    for count in _counts_of_rank_0(sorted(counts), engine.decoder.ranks, num_tokens):
        torch.cuda.reset_peak_memory_stats(device)
        hidden = engine.prompts.run_dummy(count)
        if count <= SCORED_ROWS:  # of first tokens, of which there are any number at once, or of scored ones
            engine.decoder.logits(hidden)
    score_hidden(engine.decoder, hidden, torch.zeros(num_tokens, dtype=torch.int64, device=device), 1)
    prefill = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    for filters, size in ((NO_FILTERS, 1), (NO_FILTERS, engine.graphs.sizes[-1]), (CUT, engine.graphs.sizes[-1])):
        engine.graphs.step(seats.on_device([seats.padding_seat] * size), filters)
    step = torch.cuda.max_memory_allocated(device) - before
    _compile_the_rest(engine, hidden[:1])
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # The graphs have a memory pool of their own, beside the memory that prefill takes from the allocator: for a step, and for the
    # known tokens beside it. Each graph holds the scores of its step, if they are kept.
    sizes, places = engine.graphs.sizes, max(step.tree.max_depth for step in engine.graphs.steps) + 1
    kinds = CUT + 1  # of filters, each with graphs of its own
    held = engine.graphs.num_scores(num_tokens) * kinds if engine.graphs.step.keep_scores else 0
    # No step holds changed scores until a request needs one of the tables that change logits: those of all nodes at once for the
    # ratio rules, else of FILTERED_ROWS; before that, those that a level of the draft is drawn from.
    tree = engine.tree.tree
    rows, level = sizes[-1] * tree.num_nodes, tree.num_nodes if tree.grows else max(Counter(tree.depths).values())
    changed = rows if isinstance(engine.graphs.step.verifier, Ratio) else min(rows, FILTERED_ROWS)
    changed += sizes[-1] * max(places, level)
    return 2 * prefill + step + (held + changed) * engine.decoder.vocab_size * 4


def _counts_of_rank_0(counts, ranks, most):
    """The numbers of rows of rank 0: ranks gather in every pass, and their products may differ in shape, and so in launches."""
    length = int(ranks.of_first([len(counts)])[0])
    return [int(count) for count in ranks.of_first((counts + [most] * length)[:length])]


def _compile_the_rest(engine, hidden):
    """Run the kernels that only some requests need, as first tokens, in small and large steps, need them.  hidden [1, H]"""
    seats, keep_scores = engine.seats, engine.graphs.step.keep_scores
    padding = seats.on_device([seats.padding_seat])
    for filters in (NO_FILTERS, CHANGED, CUT):
        with seats.logit_state.all_tables() if filters else nullcontext():
            *_, scored = engine.prompts.draw(padding, hidden, filters, keep_scores)
            for step in engine.graphs.steps if filters else ():
                for size in {1, engine.graphs.sizes[-1]}:
                    step(padding.expand(size).contiguous(), filters)
    engine.prompts.draw(padding, hidden, CUT, keep_scores)  # of logits that no table changes
    for width in WIDTHS:
        for logits in (scored, engine.decoder.logits(hidden)):
            gather_logprobs(logits, torch.zeros_like(padding), width)
