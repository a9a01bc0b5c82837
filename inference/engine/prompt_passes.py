"""Compute the keys and values of known tokens: run them through the target, and through a drafter's own layer.

On a GPU all chunks of a step go in one pass of the prefill kernels. On the CPU one request follows the other, as a chain of known
nodes in the pass that verifies drafts. This file does not draw tokens or advance requests (engine.py does).

Letters: T tokens of all chunks, H hidden size, F width of the feature, M rows of a pass.
"""

import torch

from ...kernels.attention.prefill_attention import build_prefill_index
from ...kernels.attention.tree_attention import PAGE, build_tree_index
from ..models.decoder import ForwardPass
from ..speculation.tree import MAX_NODES, chain
from ..speculation.tree_on_device import TreeOnDevice

# Number of tokens of a prompt that the CPU computes at a time.
CPU_CHUNK = MAX_NODES


class PromptPasses:
    """decoder: Decoder; cache: PagedCache; seats: SeatTable; drafter: Drafter."""

    def __init__(self, decoder, cache, seats, drafter):
        self.decoder, self.cache, self.seats, self.drafter = decoder, cache, seats, drafter
        self.tree = TreeOnDevice.of(chain(CPU_CHUNK - 1), decoder.device)

    def run(self, chunks):
        """Run the target over all chunks, then compute the drafter's own keys and values of them.

        chunks: list of scheduler.Chunk  ->  hidden [T, H], feature [T, F] of their tokens, one chunk after the other
        """
        rows = []
        for chunk in chunks:
            known = chunk.request.known_token_ids
            rows.append((chunk.request, chunk.start, known[chunk.start : chunk.start + chunk.count]))
        passes = self._passes(rows, self.cache.num_kv_heads, self.decoder.dtype)
        hidden, feature = zip(*(self._forward(forward_pass) for forward_pass, _ in passes))
        hidden, feature = torch.cat(hidden), torch.cat(feature)
        if self.drafter.keeps_state:
            self._fill(chunks, feature)
        return hidden, feature

    def run_dummy(self, num_tokens):
        """The same for a dummy prompt in the padding seat, with its last token's logits, to measure memory.  -> hidden [T, H]"""
        device, seat = self.decoder.device, self.seats.on_device([self.seats.padding_seat])
        positions = torch.arange(num_tokens, device=device)

        def forward_pass(num_kv_heads):
            index = build_prefill_index(self.seats.block_table[seat], [0], [num_tokens], num_kv_heads, device)
            return ForwardPass(torch.zeros_like(positions), positions, positions % PAGE, index)

        hidden, feature = self._forward(forward_pass(self.cache.num_kv_heads))
        if self.drafter.keeps_state:
            self.drafter.fill(forward_pass(self.drafter.kv_shape[1]), feature)
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
