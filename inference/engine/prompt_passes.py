"""Compute the keys and values of known tokens: run them through the target, and through a drafter's own layer.

On a GPU all chunks of a step go in one pass: the rows of a CUDA graph (KnownRows), which may be those of the running requests, too,
or, where they are many, a pass launched kernel by kernel. On the CPU one request follows the other, as a chain of known nodes in
the pass that verifies drafts. Rows do not depend on each other, so no way changes a bit. Also here: the first token's draw.

Letters: T tokens of all chunks, H hidden size, F width of the feature, M rows of a pass.
"""

from typing import NamedTuple

import torch

from ...kernels.attention.prefill_attention import PrefillIndex, build_prefill_index
from ...kernels.attention.tree_attention import PAGE, build_tree_index
from ..models.decoder import ForwardPass
from ..speculation.tree import MAX_NODES, chain
from ..speculation.tree_on_device import TreeOnDevice
from .target_scores import TargetScores, next_filters

# Number of tokens of a prompt that the CPU computes at a time.
CPU_CHUNK = MAX_NODES
MAX_CHUNKS = 16  # in a graph


class KnownOutput(NamedTuple):
    """What a pass gave of known tokens."""

    hidden: torch.Tensor  # [T, H]; with unfinished rows [MAX_CHUNKS, H], of each chunk's last token
    feature: torch.Tensor | None  # [T, F]; None: the hidden states
    unfinished: object = None  # Unfinished of the T tokens; None: all are finished

    def last(self, rows, chunks):
        """Of tokens that end a chunk: rows [B] among all, chunks [B] which chunk each ends  ->  hidden [B, H], feature [B, F]"""
        hidden = self.hidden[rows if self.unfinished is None else chunks]
        return hidden, hidden if self.feature is None else self.feature[rows]

    def of(self, decoder, start, stop):
        """Hidden states of some tokens, finished first where the pass left them.  -> [stop - start, H]

        To be called before the next pass, which writes over what is unfinished.
        """
        if self.unfinished is None:
            return self.hidden[start:stop]
        return decoder.finish(self.unfinished.of(slice(start, stop)))


class KnownRows:
    """`size` rows for known tokens of at most MAX_CHUNKS chunks, in buffers that a graph reads.

    Rows that hold none stand for token 0 at the first place of page 0. A drafter with keys and values of its own has a second set
    of rows: its tokens, and the rows of the first set whose features it reads.
    """

    def __init__(self, size, seats, drafter):
        self.size, self.seats, self.drafter = size, seats, drafter
        self.numbers = torch.zeros(
            1 + drafter.keeps_keys, 4 * size + 4 * MAX_CHUNKS, dtype=torch.int64, device=seats.device
        )
        self.write(*[[]] * len(self.numbers))

    def write(self, *parts):
        """Copy to the device without waiting for it: for each set its chunks (request, first place, tokens, first row)."""
        host = torch.zeros(self.numbers.shape, dtype=torch.int64)
        for numbers, rows in zip(host, parts):
            tokens, positions, places, sources, seats, starts, counts, ends = self._split(numbers)
            seats.fill_(self.seats.padding_seat)
            end = 0
            for i, (request, start, known, source) in enumerate(rows):
                some = slice(end, end + len(known))
                end += len(known)
                position = torch.arange(start, start + len(known))
                tokens[some], positions[some] = torch.tensor(known), position
                places[some] = torch.tensor(request.pages)[position // PAGE] * PAGE + position % PAGE
                sources[some] = torch.arange(source, source + len(known))
                seats[i], starts[i], counts[i], ends[i] = request.seat, start, len(known), end - 1
        self.numbers.copy_(host.pin_memory() if self.numbers.is_cuda else host, non_blocking=True)

    def forward_pass(self, num_kv_heads, part=0):
        """The rows of a set as a ForwardPass of `size` rows."""
        tokens, positions, places, _, seats, starts, counts, _ = self._split(self.numbers[part])
        index = PrefillIndex(self.seats.block_table[seats], starts, counts, None, num_kv_heads, self.size)
        return ForwardPass(tokens, positions, places, index)

    @property
    def ends(self):
        """[MAX_CHUNKS] the row of each chunk's last token; 0 for chunks that are not there"""
        return self._split(self.numbers[0])[7]

    def fill(self, feature):
        """Compute the drafter's own keys and values, where it has any.  feature [T, F] of the first set's rows"""
        if self.drafter.keeps_keys:
            sources = self._split(self.numbers[1])[3]
            self.drafter.fill(self.forward_pass(self.drafter.kv_shape[1], part=1), feature[sources])

    def _split(self, numbers):
        """tokens, positions, places, sources [T]; seats, starts, counts, ends [MAX_CHUNKS]"""
        return numbers.split([self.size] * 4 + [MAX_CHUNKS] * 4)


class PromptPasses:
    """decoder: Decoder; cache: PagedCache; seats: SeatTable; drafter: Drafter; graphs: StepGraphs."""

    def __init__(self, decoder, cache, seats, drafter, graphs):
        self.decoder, self.cache, self.seats, self.drafter, self.graphs = decoder, cache, seats, drafter, graphs
        self.tree = TreeOnDevice.of(chain(CPU_CHUNK - 1), decoder.device)
        self.above_root = torch.tensor([-1], device=decoder.device)

    def draw_first(self, requests, hidden, keep_scores):
        """Draw the first token of every request that has none.  hidden [B, H] of the requests' last tokens

        -> those requests, emitted [B', 2], the logits or scores [B', 1, V] that the tokens are scored by (or None)
        """
        # A request that was preempted goes on from its newest token.
        fresh = [i for i, request in enumerate(requests) if not request.output_token_ids]
        if not fresh:
            return [], hidden[:0], None
        requests = [requests[i] for i in fresh]
        seats = self.seats.on_device([request.seat for request in requests])
        filters = max(map(next_filters, requests))
        batch, tokens, scored = self.draw(seats, hidden[self.seats.on_device(fresh)], filters, keep_scores)
        self.seats.write_first_tokens(seats, tokens, batch.committed)
        self.seats.integers[seats, 2] = batch.remaining - 1
        emitted = torch.stack((torch.ones_like(tokens), tokens), 1)
        if filters:
            self.seats.logit_state.record(seats, emitted)
        return requests, emitted, scored[:, None]

    def draw(self, seats, hidden, filters, keep_scores):
        """The tokens after the last known ones.  seats [B], hidden [B, H] -> BatchRows, tokens [B], what scores them [B, V]"""
        # The last token of the prompt is a node one above the root: the token after it stands at L.
        batch = self.seats.gather(seats, self.above_root)
        logits = self.decoder.logits(hidden)
        scores = torch.empty_like(logits, dtype=torch.float32) if keep_scores else None
        tokens = TargetScores(batch, logits, filters, self.seats, processed=scores).sample().flatten()
        return batch, tokens, logits if scores is None else scores

    def place(self, chunks, num_requests=0, which=None):
        """The KnownRows of a graph that hold these chunks beside so many requests in one of the steps, written; None if none do."""
        known = self.graphs.known_rows(sum(chunk.count for chunk in chunks), num_requests, which)
        if known is None or len(chunks) > MAX_CHUNKS:
            return None
        rows, fills, end = [], [], 0
        for chunk in chunks:
            tokens = chunk.request.known_token_ids[chunk.start : chunk.start + chunk.count]
            rows.append((chunk.request, chunk.start, tokens, end))
            if self.drafter.keeps_keys:
                count, tokens = self.drafter.prompt_rows(chunk)
                if count:
                    fills.append((chunk.request, chunk.start, tokens, end))
            end += chunk.count
        known.write(*[rows, fills][: len(known.numbers)])
        return known

    def run(self, chunks):
        """Run the target over all chunks, then compute the drafter's own keys and values of them.

        chunks: list of scheduler.Chunk  ->  KnownOutput of their tokens, one chunk after the other
        """
        known = self.place(chunks)
        if known is not None:
            return self.graphs.run_known(known)
        rows = []
        for chunk in chunks:
            known = chunk.request.known_token_ids
            rows.append((chunk.request, chunk.start, known[chunk.start : chunk.start + chunk.count]))
        passes = self._passes(rows, self.cache.num_kv_heads, self.decoder.dtype)
        hidden, feature = zip(*(self._forward(forward_pass) for forward_pass, _ in passes))
        hidden, feature = torch.cat(hidden), torch.cat(feature)
        if self.drafter.keeps_keys:
            self._fill(chunks, feature)
        return KnownOutput(hidden, feature)

    def run_dummy(self, num_tokens):
        """The same for a dummy prompt in the padding seat, with its last token's logits, to measure memory.  -> hidden [T, H]"""
        device, seat = self.decoder.device, self.seats.on_device([self.seats.padding_seat])
        positions = torch.arange(num_tokens, device=device)

        def forward_pass(num_kv_heads):
            index = build_prefill_index(self.seats.block_table[seat], [0], [num_tokens], num_kv_heads, device)
            return ForwardPass(torch.zeros_like(positions), positions, positions % PAGE, index)

        hidden, feature = self._forward(forward_pass(self.cache.num_kv_heads))
        if self.drafter.keeps_keys:
            self.drafter.run_dummy(forward_pass(self.drafter.kv_shape[1]), feature)
        self.decoder.logits(hidden[-1:])
        return hidden

    def _forward(self, forward_pass):
        """Run the target over some rows.  -> hidden [M, H], feature [M, F]"""
        return self.decoder.forward(forward_pass, self.cache.kv, self.drafter.streams)

    def _fill(self, chunks, feature):
        """Compute the drafter's own keys and values of the chunks.  feature [T, F]"""
        rows, features, end = [], [], 0
        for chunk in chunks:
            end += chunk.count
            count, tokens = self.drafter.prompt_rows(chunk)
            if count:
                rows.append((chunk.request, chunk.start, tokens))
                features.append(feature[end - chunk.count : end - chunk.count + count])
        if rows:
            features = torch.cat(features)
            for forward_pass, part in self._passes(rows, self.drafter.kv_shape[1], self.drafter.kv_shape[3]):
                self.drafter.fill(forward_pass, features[part])

    def _passes(self, rows, num_kv_heads, dtype):
        """(ForwardPass, which of all rows it holds) for rows of requests: a list of (request, place of the first, their tokens)."""
        if self.decoder.device.type == "cuda":
            packed = [
                (torch.tensor(tokens), torch.arange(start, start + len(tokens)), torch.tensor(request.pages))
                for request, start, tokens in rows
            ]
            places = [pages[position // PAGE] * PAGE + position % PAGE for _, position, pages in packed]
            parts = [torch.cat(part) for part in ([x[0] for x in packed], [x[1] for x in packed], places)]
            tokens, positions, places = self.seats.on_device(torch.stack(parts)).unbind()
            block_table = self.seats.block_table[self.seats.on_device([request.seat for request, _, _ in rows])]
            starts, counts = [start for _, start, _ in rows], [len(tokens) for _, _, tokens in rows]
            index = build_prefill_index(block_table, starts, counts, num_kv_heads, self.decoder.device)
            yield ForwardPass(tokens, positions, places, index), slice(None)
            return
        first = 0
        for request, start, tokens in rows:
            pages = torch.tensor(request.pages)
            for at in range(0, len(tokens), CPU_CHUNK):
                part = torch.tensor(tokens[at : at + CPU_CHUNK])
                position = start + at + torch.arange(len(part))
                nodes = self.tree.depths[: len(part)], self.tree.ancestors[: len(part), : len(part)]
                index = build_tree_index(pages[None], position[:1], *nodes, num_kv_heads, dtype)
                places = pages[position // PAGE] * PAGE + position % PAGE
                yield ForwardPass(part, position, places, index), slice(first, first + len(part))
                first += len(part)
