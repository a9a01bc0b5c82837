"""CUDA graphs, captured once and replayed: of the step, one per batch bucket, and of prompts, one per number of tokens.

A batch bucket is a number of rows: 1, 2, 4, 8 ... up to max_num_seqs. Rows without a request point to the slot of nobody. All
graphs of a kind share one memory pool, so what a replay leaves behind must be read before the next one: in stream order it is.
"""

import torch

from ..kernels.prefill_attention import PrefillIndex, build_prefill_index
from .decoder import ForwardPass

# Numbers of tokens that a pass over prompts is captured for. Longer ones keep the device busy while the host launches them.
PREFILL_SIZES = (16, 32, 64, *range(128, 2049, 128))
CAPTURED_CHUNKS = 8  # requests of a captured pass over prompts, at most


def buckets(max_num_seqs):
    """Numbers of rows that get a graph of their own.  6 -> [1, 2, 4, 6]"""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes


class StepGraphs:
    """Runs a Step for any number of requests: through a graph of the smallest bucket that holds them, or directly.

    step: Step; captured: False runs every step directly (always so where there is no GPU).
    """

    def __init__(self, step, max_num_seqs, captured=True):
        self.step, self.sizes = step, buckets(max_num_seqs)
        self.captured = captured and step.slots.device.type == "cuda"
        self._graphs = {}  # (rows, filtered) -> (graph, static row numbers, StepOutput)
        self._rows = {}  # (rows, filtered) -> the slots that the static row numbers hold now
        self._pool = None

    def capture(self, progress=lambda sizes: sizes):
        """Make the graphs of all buckets; those with filters are made when first used. Largest first: it sizes the pool."""
        if self.captured:
            for size in progress(self.sizes[::-1]):
                self._graph(size, False)

    def run(self, slots, filtered):
        """One step of the requests in `slots` (a host list).  -> StepOutput, whose first len(slots) rows are theirs"""
        if not self.captured:
            return self.step(self.step.slots.on_device(slots), filtered)
        size = next(size for size in self.sizes if size >= len(slots))
        graph, rows, output = self._graph(size, filtered)
        padded = slots + [self.step.slots.nobody] * (size - len(slots))
        if self._rows[size, filtered] != padded:
            rows.copy_(torch.tensor(padded).pin_memory(), non_blocking=True)
            self._rows[size, filtered] = padded
        graph.replay()
        return output

    def _graph(self, size, filtered):
        key = (size, filtered)
        if key not in self._graphs:
            device = self.step.slots.device
            rows = torch.full((size,), self.step.slots.nobody, device=device)
            if filtered:
                self.step.slots.stop_mask  # noqa: B018  it must exist before the capture
            left = {}  # what a run leaves behind; the capture's in the end

            def work():  # the rows of nobody change nothing
                left["output"] = self.step(rows, filtered)

            graph = capture_graph(work, device, self._pool)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = (graph, rows, left["output"])
            self._rows[key] = [self.step.slots.nobody] * size
        return self._graphs[key]


class PrefillPasses:
    """The target over chunks of prompts, packed one behind the other.

    Launching its kernels one by one takes the host as long as a thousand tokens take an H200, and longer where the host is busy: so
    passes of up to PREFILL_SIZES[-1] tokens of CAPTURED_CHUNKS requests are graphs, rounded up to the next size. Rows behind the
    last token are nobody's and write to page 0; by row-invariance nobody sees them.

    decoder: Decoder; cache: PagedCache; slots: SlotTable; captured: False launches every pass directly.
    """

    def __init__(self, decoder, cache, slots, max_num_tokens, captured=True):
        self.decoder, self.cache, self.device = decoder, cache, decoder.device
        captured = captured and self.device.type == "cuda"
        most = next((size for size in PREFILL_SIZES if size >= max_num_tokens), PREFILL_SIZES[-1])
        self.sizes = [size for size in PREFILL_SIZES if size <= most] if captured else []
        self._graphs = {}  # size -> (graph, rows int64 [3, size]: tokens, positions, cache slots)
        if captured:
            wide = slots.block_table.shape[1]
            self._table = torch.zeros(CAPTURED_CHUNKS, wide, dtype=torch.int32, device=self.device)
            self._chunks = torch.zeros(2, CAPTURED_CHUNKS, dtype=torch.int32, device=self.device)  # starts, counts
            self._hidden = torch.zeros(most, decoder.hidden_size, dtype=decoder.dtype, device=self.device)

    @torch.no_grad()
    def capture(self, progress=lambda sizes: sizes):
        """Make the graphs of all sizes, largest first: it sizes the pool."""
        pool = None
        for size in progress(self.sizes[::-1]):
            rows = torch.zeros(3, size, dtype=torch.int64, device=self.device)
            index = PrefillIndex(self._table, *self._chunks, size, None, self.cache.num_kv_heads)

            def forward(rows=rows, index=index, size=size):
                self._hidden[:size] = self.decoder.forward(ForwardPass(*rows, index), self.cache.kv)

            self._graphs[size] = capture_graph(forward, self.device, pool), rows
            pool = pool or self._graphs[size][0].pool()

    def run(self, tokens, positions, places, block_table, starts, counts):
        """Hidden states behind the final norm of all rows, to be read before the next pass.

        tokens, positions, places: host tensors [T], places as ForwardPass.cache_slots; block_table [R, P] on the device; starts and
        counts of the R chunks: lists  ->  [T, H]
        """
        count = len(tokens)
        size = next((size for size in self.sizes if size >= count), None)
        packed = torch.zeros(3, size or count, dtype=torch.int64)
        packed[:, :count] = torch.stack((tokens, positions, places))
        packed = packed.pin_memory()
        if size is None or len(counts) > CAPTURED_CHUNKS:
            index = build_prefill_index(block_table, starts, counts, self.cache.num_kv_heads, self.device)
            rows = packed[:, :count].to(self.device, non_blocking=True)
            return self.decoder.forward(ForwardPass(*rows, index), self.cache.kv)
        graph, rows = self._graphs[size]
        chunks = torch.zeros(2, CAPTURED_CHUNKS, dtype=torch.int32)
        chunks[:, : len(counts)] = torch.tensor([starts, counts])
        rows.copy_(packed, non_blocking=True)
        self._chunks.copy_(chunks.pin_memory(), non_blocking=True)
        self._table[: len(counts)] = block_table
        graph.replay()
        return self._hidden[:count]


def capture_graph(work, device, pool=None):
    """A CUDA graph of `work`, a function of no arguments, which runs once before: that compiles its kernels."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        work()
    return graph
