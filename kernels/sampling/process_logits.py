"""Change logits as a request asks, before the temperature: bias, forbidden tokens, penalties.

    x = logits (fp32) + bias[seat]                                   logit_bias; minus infinity for tokens that are not allowed
    x = -inf where a bit of masks[seat, depth] is 0                  structured outputs
    x = -inf where stop_mask[seat] and position < min_position       min_tokens
    x = x / r where x > 0, x * r elsewhere                           repetition r, tokens of the prompt or the output
    x = x - f * count - p * (count > 0)                              frequency f, presence p, tokens of the output
    x = -inf for the last token of a bad word whose first ones are the newest tokens of the node's sequence

    process_logits  [M, V] -> fp32 [M, V]

Temperature, min-p, top-k and top-p follow in keep_top.py. This is vLLM's order; a token may be forbidden at any point of it,
because minus infinity stays minus infinity. A row is a node of a draft tree. Its output is its request's output up to the root,
which the tables hold, followed by the tokens on the node's own path. So a row's distribution is that of plain decoding at that
position. Every operation is fp32, elementwise and rounded by itself (IEEE division, nothing fused): a row's bits never depend on
other rows.

A table that no request has needed yet is None and costs nothing. A request that does not need a table has a row of "no change".

Letters: M rows, S seats, V vocabulary, D the tree's depth, T tokens of the longest sequence, K masks, W words of 32 bits.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton

MAX_BAD_WORDS = 128  # bad words of several tokens per request
MAX_BAD_WORD_TOKENS = 16  # tokens of the longest

_CHUNK = 1024  # tokens per program; nothing is added across programs


class LogitTables(NamedTuple):
    """Tables with a row per seat. A table is None until some request needs it."""

    bias: torch.Tensor | None = None  # fp32 [S, V]; 0 changes nothing
    stop_mask: torch.Tensor | None = None  # bool [S, V]: tokens that min_tokens forbids
    counts: torch.Tensor | None = None  # int32 [S, V]: how often a token is in the output, the root included
    seen: torch.Tensor | None = None  # bool [S, V]: whether a token is in the prompt; None exactly where counts is
    words: torch.Tensor | None = None  # int32 [S, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], right-aligned, -1 elsewhere
    tokens: torch.Tensor | None = None  # int32 [S, T]: the sequence with the root; None exactly where words is
    masks: torch.Tensor | None = (
        None  # int32 [S, K, W]: bit t % 32 of word t // 32 allows token t after a node of each depth
    )


class NodeRows(NamedTuple):
    """The seat, positions, penalties and path of every row."""

    seat: torch.Tensor  # int64 [M]
    root: torch.Tensor  # int64 [M] position of the request's root
    position: torch.Tensor  # int64 [M] of the token drawn after the node; the node itself is at position - 1
    min_position: torch.Tensor  # int64 [M]
    repetition: torch.Tensor  # fp32 [M] > 0; 1 changes nothing
    presence: torch.Tensor  # fp32 [M]; 0 changes nothing
    frequency: torch.Tensor  # fp32 [M]; 0 changes nothing
    path: torch.Tensor  # int64 [M, D] tokens from the root's child to the node itself, -1 after it


def process_logits_reference(logits, nodes, tables):
    """The formulas in plain torch, for any device."""
    scores = logits.float()
    if tables.bias is not None:
        scores = scores + tables.bias[nodes.seat]
    if tables.masks is not None:
        words = tables.masks[nodes.seat, _mask_of(nodes.position - nodes.root - 1, tables.masks.shape[1])]  # [M, W]
        bits = words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
        scores = scores.masked_fill(bits.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)
    if tables.stop_mask is not None:
        early = nodes.position < nodes.min_position
        scores = scores.masked_fill(tables.stop_mask[nodes.seat] & early[:, None], -torch.inf)
    if tables.counts is not None:
        counts = tables.counts[nodes.seat]
        counts.scatter_add_(1, nodes.path.clamp(min=0), (nodes.path >= 0).int())
        repetition, presence, frequency = (x[:, None] for x in (nodes.repetition, nodes.presence, nodes.frequency))
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where((counts > 0) | tables.seen[nodes.seat], repeated, scores)
        scores = scores - frequency * counts
        scores = scores - presence * (counts > 0)
    if tables.words is not None:
        words = tables.words[nodes.seat]  # [M, W, MAX_BAD_WORD_TOKENS]
        first, last = words[..., :-1], words[..., -1].long()
        met = ((first == _newest_tokens(nodes, tables.tokens)[:, None]) | (first < 0)).all(-1) & (last >= 0)
        forbidden = torch.zeros_like(scores, dtype=torch.int32)
        forbidden.scatter_add_(1, last.clamp(min=0), met.int())
        scores = scores.masked_fill(forbidden > 0, -torch.inf)
    return scores if scores is not logits else logits.clone()


def _mask_of(depth, num_masks):
    """Number of the mask after nodes of these depths; -1 is the end of a prompt, whose first token is drawn by the first mask."""
    return depth.clamp(0, num_masks - 1)


def _newest_tokens(nodes, tokens):
    """The last MAX_BAD_WORD_TOKENS - 1 tokens of the nodes' sequences, -2 before the first.  -> [M, MAX_BAD_WORD_TOKENS - 1]"""
    ago = torch.arange(MAX_BAD_WORD_TOKENS - 1, 0, -1, device=tokens.device)
    place = nodes.position[:, None] - ago
    known = tokens[nodes.seat[:, None], torch.minimum(place, nodes.root[:, None]).clamp(min=0)].long()
    if nodes.path.shape[1]:
        below = place - nodes.root[:, None] - 1  # of the root's child: 0
        drafted = nodes.path.gather(1, below.clamp(0, nodes.path.shape[1] - 1))
        known = torch.where(below >= 0, drafted, known)
    return torch.where(place >= 0, known, -2)


@jit(
    do_not_specialize=["depth", "has_bias", "has_stops", "has_penalties", "num_masks", "num_words"],
    do_not_specialize_on_alignment=["root", "position", "min_position"],
)
def _process(
    logits, scores, bias, stop_mask, counts, seen, masks, seat, root, position, min_position, repetition, presence, frequency, path,
    depth, has_bias, has_stops, has_penalties, num_masks, num_words, vocab_size, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    at = tl.load(seat + row).to(tl.int64) * vocab_size + token
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        x = x + tl.load(bias + at, mask=inside, other=0.0)
    if num_masks:
        below = tl.load(position + row) - tl.load(root + row) - 1
        number = tl.load(seat + row).to(tl.int64) * num_masks + tl.minimum(tl.maximum(below, 0), num_masks - 1)
        word = tl.load(masks + number * num_words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 1, x, float("-inf"))
    if has_stops:
        early = tl.load(position + row) < tl.load(min_position + row)
        stops = tl.load(stop_mask + at, mask=inside, other=0).to(tl.int1)
        x = tl.where(stops & early, float("-inf"), x)
    if has_penalties:
        count = tl.load(counts + at, mask=inside, other=0)
        for i in range(depth):
            count += (tl.load(path + row * depth + i) == token).to(tl.int32)
        in_output = count > 0
        in_prompt = tl.load(seen + at, mask=inside, other=0).to(tl.int1)
        r = tl.full(x.shape, 1.0, tl.float32) * tl.load(repetition + row)
        x = tl.where(in_output | in_prompt, tl.where(x > 0, tl.div_rn(x, r), x * r), x)
        x = x - tl.load(frequency + row) * count.to(tl.float32)
        x = x - tl.load(presence + row) * in_output.to(tl.float32)
    tl.store(scores + row * vocab_size + token, x, mask=inside)


@jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["position", "root"])
def _forbid_words(
    scores, words, tokens, seat, root, position, path, depth, length, vocab_size, WORDS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seat_ = tl.load(seat + row).to(tl.int64)
    root_, next_ = tl.load(root + row), tl.load(position + row)
    table = words + (seat_ * WORDS + tl.arange(0, WORDS)) * TOKENS
    last = tl.load(table + TOKENS - 1)
    met = last >= 0
    for i in tl.static_range(TOKENS - 1):
        place = next_ - (TOKENS - 1) + i
        known = tl.load(tokens + seat_ * length + place, mask=(place >= 0) & (place <= root_), other=-2).to(tl.int64)
        drafted = tl.load(path + row * depth + place - root_ - 1, mask=place > root_, other=-2)
        wanted = tl.load(table + i).to(tl.int64)
        met &= (wanted < 0) | (wanted == tl.where(place > root_, drafted, known))
    tl.store(scores + row * vocab_size + last, float("-inf"), mask=met)


def process_logits(logits, nodes, tables):
    """Apply bias, forbidden tokens and penalties; temperature, min-p, top-k and top-p follow.  logits [M, V] -> fp32 [M, V]

    nodes: NodeRows; tables: LogitTables. Raises ValueError for shapes that do not fit.
    """
    rows, vocab_size = logits.shape
    if any(len(x) != rows for x in nodes):
        raise ValueError(
            f"process_logits takes one entry per row of logits {tuple(logits.shape)}, got {list(map(len, nodes))}"
        )
    for name in ("bias", "stop_mask", "counts", "seen"):
        table = getattr(tables, name)
        if table is not None and table.shape[1:] != (vocab_size,):
            raise ValueError(f"{name} must be [S, {vocab_size}], got {tuple(table.shape)}")
    if tables.masks is not None and 32 * tables.masks.shape[2] < vocab_size:
        raise ValueError(f"masks must have a bit for each of {vocab_size} tokens, got {tuple(tables.masks.shape)}")
    for one, other in (("counts", "seen"), ("words", "tokens")):
        if (getattr(tables, one) is None) != (getattr(tables, other) is None):
            raise ValueError(f"{one} and {other} are of use together: give both or neither")
    if not on_triton(logits):
        return process_logits_reference(logits, nodes, tables)
    scores = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    if not rows:
        return scores
    nodes = NodeRows(*(x.contiguous() for x in nodes))
    depth = nodes.path.shape[1]
    # One kernel for any tables: nobody should wait for a compiler when a request needs the first of its kind.
    bias, stop_mask, counts, seen = (
        logits.new_empty(0, dtype=dtype) if table is None else table
        for table, dtype in zip(tables, (torch.float32, torch.bool, torch.int32, torch.bool))
    )
    masks = tables.masks if tables.masks is not None else seen.new_empty((0, 0, 0), dtype=torch.int32)
    has_bias, has_stops, has_penalties = (int(x is not None) for x in (tables.bias, tables.stop_mask, tables.counts))
    _process[(triton.cdiv(vocab_size, _CHUNK), rows)](
        logits.contiguous(), scores, bias, stop_mask, counts, seen, masks,
        nodes.seat, nodes.root, nodes.position, nodes.min_position, nodes.repetition, nodes.presence, nodes.frequency, nodes.path,
        depth, has_bias, has_stops, has_penalties, *masks.shape[1:], vocab_size, _CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if tables.words is not None:
        _forbid_words[(rows,)](
            scores, tables.words, tables.tokens, nodes.seat, nodes.root, nodes.position, nodes.path,
            depth, tables.tokens.shape[1], vocab_size, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, num_warps=1,
        )  # fmt: skip
    return scores
