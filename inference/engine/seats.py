"""Device state of every admitted request: one row ("seat") per request, read and advanced by the step itself.

The host writes a row when a request is admitted, when it gets pages, and when its prompt is done. After that the step keeps the row
up to date, and the host only reads emitted tokens, one step late. The last row is the padding seat: batch rows without a request
point to it, and to page 0 of the cache.

Letters: S seats, B rows of a batch, P pages of the longest request, T tokens that they hold, H width of a feature.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from ...kernels.attention.tree_attention import PAGE
from ...kernels.speculation.seat_rows import advance_seats, gather_seats
from .logit_state import LogitState

# Columns of SeatTable.integers. committed: L; root: the newest token; remaining: number of tokens that may still be emitted, which
# bounds what is accepted, so at most 1 for a request that accepts no drafts; min_position: tokens before this position must not be
# stop tokens (min_tokens).
INTEGERS = ("committed", "root", "remaining", "seed", "sample", "top_k", "min_position")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_CHANGE = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # floats of a seat without a request


@dataclass(frozen=True)
class BatchRows:
    """The gathered seats of one batch, and the values derived for the nodes of its tree (GatheredSeats)."""

    seats: torch.Tensor  # [B]
    integers: torch.Tensor  # [7, B]
    floats: torch.Tensor  # [6, B]
    block_table: torch.Tensor  # [B, P]
    feature: torch.Tensor  # [B, H]
    positions: torch.Tensor  # [B N]
    cache_rows: torch.Tensor  # [B N]
    draws: torch.Tensor  # [3, B N] seed, sample, position of the token drawn after each node
    node_temperature: torch.Tensor  # [B N]
    history: torch.Tensor  # int32 [S, T] of all seats, not gathered: the sequence up to and including the root

    committed = property(lambda self: self.integers[0])
    root = property(lambda self: self.integers[1])
    remaining = property(lambda self: self.integers[2])
    seed = property(lambda self: self.integers[3])
    sample = property(lambda self: self.integers[4])
    top_k = property(lambda self: self.integers[5])
    min_position = property(lambda self: self.integers[6])
    temperature = property(lambda self: self.floats[0])
    top_p = property(lambda self: self.floats[1])
    min_p = property(lambda self: self.floats[2])
    repetition_penalty = property(lambda self: self.floats[3])
    presence_penalty = property(lambda self: self.floats[4])
    frequency_penalty = property(lambda self: self.floats[5])

    @functools.cached_property
    def chain(self):
        """Positions and cache rows of a chain's nodes, one after the other: those of the places L .. L + N - 1.  two [N, B]"""
        rows = self.cache_rows.view(len(self.seats), -1).t().contiguous()
        return self.committed + torch.arange(len(rows), device=rows.device)[:, None], rows

    def at_depths(self, depths):
        """The same rows for nodes at depths [B, N]; they were gathered for depth 0."""
        deeper = depths.flatten()
        draws = torch.stack((self.draws[0], self.draws[1], self.draws[2] + deeper))
        return replace(self, positions=self.positions + deeper, draws=draws)

    def one_token_ago(self):
        """The same rows before the root was emitted: L is one less. A drafter's `advance` reads them."""
        committed = self.committed - 1
        integers = torch.cat((committed[None], self.integers[1:]))
        places = committed[:, None]
        cache_rows = self.block_table.gather(1, places // PAGE).long() * PAGE + places % PAGE
        return replace(self, integers=integers, cache_rows=cache_rows.flatten())

    def places(self, start, stop):
        """Cache rows of the places L + start .. L + stop - 1.  -> int64 [B, stop - start] page * 64 + offset"""
        num_nodes = self.cache_rows.shape[0] // len(self.seats)
        if stop <= num_nodes:
            return self.cache_rows.view(-1, num_nodes)[:, start:stop]
        places = self.committed[:, None] + torch.arange(start, stop, device=self.seats.device)
        return self.block_table.gather(1, places // PAGE).long() * PAGE + places % PAGE


class SeatTable:
    """Rows of `max_num_seqs` requests, and the padding seat.

    max_pages: pages of the longest request; width, dtype: of the `feature` that the drafter keeps per request from step to step;
    most_host_drafts: the most tokens that the host may draft for a seat in a step.
    """

    def __init__(self, max_num_seqs, max_pages, width, vocab_size, dtype, device, most_host_drafts=0):
        rows = max_num_seqs + 1
        self.padding_seat, self.device = max_num_seqs, device
        self.integers = torch.zeros(rows, len(INTEGERS), dtype=torch.int64, device=device)
        self.floats = torch.tensor(NO_CHANGE, device=device).repeat(rows, 1)
        self.block_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.feature = torch.zeros(rows, width, dtype=dtype, device=device)
        self.history = torch.zeros(rows, max_pages * PAGE, dtype=torch.int32, device=device)
        self.logit_state = LogitState(self.history, vocab_size, self.on_device, most_host_drafts)

    def gather(self, seats, depths):
        """BatchRows of seats [B], for nodes of these depths [N]."""
        found = gather_seats(seats, self.integers, self.floats, self.block_table, self.feature, depths)
        return BatchRows(seats, *found, self.history)

    def advance(self, seats, hidden, tokens, path, num_accepted, bonus):
        """Update committed length, root, remaining, history and (unless `hidden` is None) feature of every row after a step.

        -> emitted [B, D + 2], see advance_seats"""
        return advance_seats(
            seats,
            self.integers,
            self.feature,
            hidden,
            tokens,
            path,
            num_accepted,
            bonus,
            padding_seat=self.padding_seat,
            history=self.history,
        )

    def write_first_tokens(self, seats, tokens, places):
        """Write the roots drawn after a prompt.  seats, tokens, places [B]"""
        self.integers[seats, 1] = tokens
        self.history[seats, places] = tokens.to(self.history.dtype)

    # --- written by the host, without waiting for the device ---

    def write_pages(self, requests):
        """Write the page numbers of these requests."""
        if not requests:
            return
        width = self.block_table.shape[1]
        rows = [request.pages + [0] * (width - len(request.pages)) for request in requests]
        seats = [request.seat for request in requests]
        self.block_table[self.on_device(seats)] = self.on_device(rows, torch.int32)

    def write_requests(self, requests, roots, stop_tokens):
        """Write everything but pages and feature, for requests whose known tokens are all computed.

        roots: their newest tokens (0 if it is still to be drawn); stop_tokens(request): ids that min_tokens forbids.
        """
        seats = self.on_device([request.seat for request in requests])
        self.integers[seats] = self.on_device(
            [
                [
                    len(request.known_token_ids),
                    root,
                    request.num_remaining if request.params.speculate else 1,
                    request.seed,
                    request.sample_index,
                    max(request.params.top_k, 0),
                    len(request.prompt_token_ids) + request.params.min_tokens,
                ]
                for request, root in zip(requests, roots)
            ]
        )
        self.floats[seats] = self.on_device(
            [[getattr(request.params, name) for name in FLOATS] for request in requests], torch.float32
        )
        known = [torch.tensor(request.prompt_token_ids + request.output_token_ids) for request in requests]
        tokens = pad_sequence(known, batch_first=True).to(self.history.dtype)
        self.history[seats, : tokens.shape[1]] = self.on_device(tokens)
        self.logit_state.write(requests, stop_tokens)

    def on_device(self, values, dtype=torch.int64):
        """A list or CPU tensor on the device, through pinned memory where there is one."""
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
