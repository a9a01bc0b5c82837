"""The two ends of an engine step, one launch each: read the rows of a batch's seats, and write them back advanced.

    gather_seats:   seats [B] -> each seat's numbers, pages and feature, and for every node its position, the cache row that takes
                    its key, and the key of the draw after it
    advance_seats:  writes committed length, root, remaining tokens and (unless the drafter writes it) feature of every seat after
                    a step; returns the emitted tokens and appends them to the seat's history

A seat table holds integers [S, I] (columns 0..2: committed length L, root, remaining tokens; 3, 4: seed, sample), floats [S, F]
(column 0: temperature), block_table [S, P], feature [S, H] and history [S, T], the seat's tokens up to and including the root.
Written as tensor operations the two cost some 40 launches, 2 % of a step of an 8B. They move and count; there are no sums.

Letters: S seats, B rows of a batch, N nodes, D the tree's depth, P pages and T tokens of the longest request, H hidden.
"""

from typing import NamedTuple

import torch

from ..attention.tree_attention import PAGE
from ..jit import jit, on_triton, tl, triton
from ..linear.linear import empty_rows


class GatheredSeats(NamedTuple):
    """Result of gather_seats."""

    integers: torch.Tensor  # int64 [I, B]
    floats: torch.Tensor  # fp32 [F, B]
    block_table: torch.Tensor  # int32 [B, P]
    feature: torch.Tensor  # [B, H]
    positions: torch.Tensor  # int64 [B N] = L + depth
    cache_rows: torch.Tensor  # int64 [B N] page * 64 + offset of place L + n
    draws: torch.Tensor  # int64 [3, B N] seed, sample, position L + depth + 1 of the token drawn after the node
    temperature: torch.Tensor  # fp32 [B N]


def gather_seats_reference(seats, integers, floats, block_table, feature, depths):
    """The same in plain torch operations."""
    integers, floats, pages = integers[seats].T, floats[seats].T, block_table[seats]
    shape = (len(seats), len(depths))
    committed = integers[0][:, None]
    positions = committed + depths  # [B, N]
    places = committed + torch.arange(len(depths), device=seats.device)
    cache_rows = pages.gather(1, places // PAGE).long() * PAGE + places % PAGE
    draws = torch.stack((integers[3][:, None].expand(shape), integers[4][:, None].expand(shape), positions + 1))
    temperature = floats[0][:, None].expand(shape)
    return GatheredSeats(
        integers.contiguous(),
        floats.contiguous(),
        pages,
        feature[seats],
        positions.flatten(),
        cache_rows.flatten(),
        draws.flatten(1),
        temperature.flatten(),
    )


def advance_seats_reference(
    seats, integers, feature, hidden, tokens, path, num_accepted, bonus, *, padding_seat, history
):
    """The same in plain torch operations."""
    num_emitted = num_accepted + 1
    kept = (seats != padding_seat).long()
    committed, _, remaining = integers[seats, :3].T
    integers[seats, :3] = torch.stack((committed + num_emitted, bonus, remaining - num_emitted), 1) * kept[:, None]
    last = path.gather(1, num_accepted[:, None]).squeeze(1)
    if hidden is not None:
        feature[seats] = hidden.view(*tokens.shape, -1)[torch.arange(len(seats), device=seats.device), last]
    step = torch.arange(path.shape[1], device=seats.device)
    follows = tokens.gather(1, path).roll(-1, 1)  # [B, D + 1] the accepted tokens at depth 1, 2, ...
    emitted = torch.where(step < num_accepted[:, None], follows, 0)
    emitted = torch.where(step == num_accepted[:, None], bonus[:, None], emitted)
    place = committed[:, None] + 1 + step  # [B, D + 1]
    written = (step < num_emitted[:, None]) & (place < history.shape[1]) & (kept == 1)[:, None]
    # Tokens that are not to be written become a zero at the first place of the seat `padding_seat`, where a zero already stands.
    at = torch.where(written, seats[:, None], padding_seat), torch.where(written, place, 0)
    history[at] = torch.where(written, emitted, 0).to(history.dtype)
    return torch.cat((num_emitted[:, None], emitted), 1)


@jit(do_not_specialize=["B"])
def _gather(
    seats, integers, floats, block_table, feature, depths,
    out_integers, out_floats, out_table, out_feature, positions, cache_rows, draws, temperature,
    B, N, P, H, I: tl.constexpr, F: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0), tl.program_id(1)
    seat = tl.load(seats + b)
    x = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_feature + b * H + x, tl.load(feature + seat * H + x, mask=x < H), mask=x < H)
    tl.store(out_table + b * P + x, tl.load(block_table + seat * P + x, mask=x < P), mask=x < P)
    if part == 0:
        for i in tl.static_range(I):
            tl.store(out_integers + i * B + b, tl.load(integers + seat * I + i))
        for i in tl.static_range(F):
            tl.store(out_floats + i * B + b, tl.load(floats + seat * F + i))
        n = tl.arange(0, NODES)
        here = n < N
        committed = tl.load(integers + seat * I)
        depth = tl.load(depths + n, mask=here, other=0).to(tl.int64)
        place = committed + n
        page = tl.load(block_table + seat * P + place // 64, mask=here, other=0).to(tl.int64)
        row = b * N + n
        tl.store(positions + row, committed + depth, mask=here)
        tl.store(cache_rows + row, page * 64 + place % 64, mask=here)
        all_rows = B * N
        tl.store(draws + row, tl.load(integers + seat * I + 3) + tl.zeros_like(depth), mask=here)
        tl.store(draws + all_rows + row, tl.load(integers + seat * I + 4) + tl.zeros_like(depth), mask=here)
        tl.store(draws + 2 * all_rows + row, committed + depth + 1, mask=here)
        warm = tl.load(floats + seat * F)
        tl.store(temperature + row, warm + tl.zeros((NODES,), tl.float32), mask=here)


@jit
def _advance(
    seats, integers, feature, hidden, tokens, path, num_accepted, bonus, emitted, history, padding_seat,
    N, J, H, T, I: tl.constexpr, DEPTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat, count = tl.load(seats + b), tl.load(num_accepted + b)
    x = part * BLOCK + tl.arange(0, BLOCK)
    if hidden is not None:
        last = tl.load(path + b * J + count)
        tl.store(feature + seat * H + x, tl.load(hidden + (b * N + last) * H + x, mask=x < H), mask=x < H)
    if part == 0:
        kept = (seat != padding_seat).to(tl.int64)
        root = tl.load(bonus + b)
        committed = tl.load(integers + seat * I)
        tl.store(integers + seat * I, (committed + count + 1) * kept)
        tl.store(integers + seat * I + 1, root * kept)
        tl.store(integers + seat * I + 2, (tl.load(integers + seat * I + 2) - count - 1) * kept)
        step = tl.arange(0, DEPTHS)
        node = tl.load(path + b * J + step + 1, mask=step < count, other=0)
        token = tl.load(tokens + b * N + node, mask=step < count, other=0)
        token = tl.where(step == count, root, token)
        tl.store(emitted + b * (J + 1), count + 1)
        tl.store(emitted + b * (J + 1) + 1 + step, token, mask=step < J)
        place = committed + 1 + step
        written = (step <= count) & (place < T) & (seat != padding_seat)
        tl.store(history + seat * T + place, token.to(tl.int32), mask=written)


def gather_seats(seats, integers, floats, block_table, feature, depths):
    """Read the rows of seats [B], and compute positions, cache rows and keys of draws for nodes of depths [N].  -> GatheredSeats"""
    if not on_triton(seats):
        return gather_seats_reference(seats, integers, floats, block_table, feature, depths)
    device, batch, num_nodes = seats.device, len(seats), len(depths)
    (_, num_integers), (_, num_floats) = integers.shape, floats.shape
    (_, num_pages), (_, hidden_size) = block_table.shape, feature.shape

    def wide(*shape):
        return torch.empty(*shape, dtype=torch.int64, device=device)

    out = GatheredSeats(
        wide(num_integers, batch),
        torch.empty(num_floats, batch, device=device),
        torch.empty(batch, num_pages, dtype=block_table.dtype, device=device),
        empty_rows(batch, hidden_size, feature.dtype, device),
        wide(batch * num_nodes),
        wide(batch * num_nodes),
        wide(3, batch * num_nodes),
        torch.empty(batch * num_nodes, device=device),
    )
    block = 1024
    _gather[batch, triton.cdiv(max(num_pages, hidden_size), block)](
        seats, integers, floats, block_table, feature, depths, *out,
        batch, num_nodes, num_pages, hidden_size,
        I=num_integers, F=num_floats, NODES=triton.next_power_of_2(num_nodes), BLOCK=block,
    )  # fmt: skip
    return out


def advance_seats(seats, integers, feature, hidden, tokens, path, num_accepted, bonus, *, padding_seat, history):
    """Advance the seats [B] in place; the seat `padding_seat` stays zero.

    hidden [B N, H] (None: features stay), tokens [B, N], path [B, D + 1], num_accepted and bonus [B] (int64)  ->  emitted
    [B, D + 2]: the number of tokens, then the accepted tokens and the bonus token, then zeros. history int32 [S, T]; a token beyond
    its end is not written
    """
    if not on_triton(seats):
        return advance_seats_reference(
            seats,
            integers,
            feature,
            hidden,
            tokens,
            path,
            num_accepted,
            bonus,
            padding_seat=padding_seat,
            history=history,
        )
    batch, num_nodes = tokens.shape
    depth, hidden_size, block = path.shape[1], 1 if hidden is None else feature.shape[1], 1024
    emitted = torch.empty(batch, depth + 1, dtype=torch.int64, device=seats.device)
    _advance[batch, triton.cdiv(hidden_size, block)](
        seats, integers, feature, hidden, tokens.contiguous(), path.contiguous(), num_accepted, bonus, emitted, history,
        padding_seat, num_nodes, depth, hidden_size, history.shape[1],
        I=integers.shape[1], DEPTHS=triton.next_power_of_2(depth), BLOCK=block,
    )  # fmt: skip
    return emitted
