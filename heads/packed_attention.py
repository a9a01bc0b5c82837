"""Causal attention over packed documents, and over a row's own keys from later steps of an unrolled forward.

    call 0:  row t sees the keys of rows <= t of its own document
    call i:  row t sees the same keys of call 0, and its own row's keys of calls 1 to i

That is EAGLE-3's training-time test (arXiv 2503.01840). The first part has one [T, T] mask for all calls, and the second is i keys
per row; the two softmaxes are joined exactly by their normalisers (kernels/training/own_keys.py). No [T, i T] mask or score matrix
is made.

Blocks of slots after some places of a row (heads/block.py) see the row's own keys up to their place, and themselves: `blocks_mask`.
In sliding layers they see only the last of these keys.

On a GPU the first part is FlexAttention, compiled, with a block mask; on the CPU, where FlexAttention has no backward, it is SDPA
with a mask (call 0) or plain products. Not supported: attention dropout, float64 on a GPU.

Letters: B rows of a batch, T tokens per row, HQ and HK query and key heads, D head dimension, R blocks per row, S slots.
"""

import contextlib
import copy
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ..kernels.training.own_keys import attend_own_keys

FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_LEAST_DIM = 16
# For rows below 128 tokens FlexAttention takes its decoding kernel, which has no configuration for some of these shapes.
FLEX_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}


class PackedAttention:
    """One layer's attention in one forward; `attend` is called once per step.

    document_ids [B, T] integers: rows with the same number see each other; padding has its own number. keys: keys and values of
    every call, [B, HK, T, D] each, one after the other.
    """

    def __init__(self, document_ids):
        self.keys = []
        self.mask = block_mask(document_ids) if _takes_flex(document_ids) else _dense_mask(document_ids)

    def after(self, keys):
        """The attention of the call that comes after those that left `keys`, whatever this one has seen."""
        found = copy.copy(self)
        found.keys = [*keys]
        return found

    def attend(self, q, k, v):
        """q [B, HQ, T, D], k and v [B, HK, T, D] of this step -> [B, HQ, T, D]"""
        self.keys += k, v
        if len(self.keys) == 2:
            return _attend(q, k, v, self.mask, with_normaliser=False)[0]
        out, normaliser = _attend(q, *self.keys[:2], self.mask, with_normaliser=True)
        return attend_own_keys(out, normaliser, q, self.keys[2::2], self.keys[3::2])


def _dense_mask(document_ids):
    """Which rows see which.  -> bool [B, 1, T, T]"""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


def block_mask(document_ids, window=None):
    """The same as FlexAttention takes it: rows of a document see each other and earlier ones; padding counts as one document.

    window: they see the last `window` rows only, their own included.
    """

    def sees(b, h, row, column):
        return (document_ids[b, row] == document_ids[b, column]) & (row >= column)

    def sees_near(b, h, row, column):
        return sees(b, h, row, column) & (row - column < window)

    size, rule = document_ids.shape[1], sees if window is None else sees_near
    return _compiled(create_block_mask)(rule, len(document_ids), None, size, size, device=document_ids.device)


class Reach(NamedTuple):
    """What the slots of a block see in a layer: how far back in the context, and whether in the block up to themselves only.

    window: None for the whole context; else W: a slot's own position and the W - 1 before it, as in transformers; with of_block
    the W positions before the block's first slot, for all slots. The slots of a block see each other whatever the window.
    """

    is_causal: bool
    window: int | None = None
    of_block: bool = False


def blocks_mask(rows, document_ids, size, reach):
    """Which keys the slots of blocks see: the T of the context, then the R S of all blocks of the row.

    rows [B, R]: block r sees its own document up to place rows[:, r], and its own slots, as far as the Reach goes;
    document_ids [B, T]; size: S  ->  BlockMask on a GPU, elsewhere bool [B, 1, R S, T + R S]
    """
    (batch, length), num_slots = document_ids.shape, rows.shape[1] * size
    if _takes_flex(document_ids):
        rule = _rule_of_blocks(rows, document_ids, size, reach)
        shape = batch, None, num_slots, length + num_slots
        return _compiled(create_block_mask)(rule, *shape, device=document_ids.device)
    places = torch.arange(length, device=rows.device)
    past = places <= rows[..., None]  # [B, R, T]
    past &= document_ids[:, None] == document_ids.gather(1, rows)[..., None]
    past = past.repeat_interleave(size, 1)  # [B, R S, T]
    slot = torch.arange(num_slots, device=rows.device)
    inside = slot[:, None] // size == slot // size
    if reach.is_causal:
        inside &= slot <= slot[:, None]
    if reach.window is not None:
        past &= places >= _lowest(rows.repeat_interleave(size, 1), slot % size, reach)[..., None]
    return torch.cat((past, inside.expand(batch, -1, -1)), 2)[:, None]


def _lowest(row, offset, reach):
    """The first place that a slot sees, by the last one before its block and its number in the block."""
    return row + 1 - reach.window if reach.of_block else row + 2 + offset - reach.window


def _rule_of_blocks(rows, document_ids, size, reach):
    """The same as a rule for FlexAttention."""
    length = document_ids.shape[1]

    def sees(b, h, slot, key):
        row, other = rows[b, slot // size], key - length
        # A slot's key has no document: the last place is read for it, and does not count.
        past = (key <= row) & (document_ids[b, key.clamp(max=length - 1)] == document_ids[b, row])
        inside = (other >= 0) & (other // size == slot // size)
        if reach.is_causal:
            inside = inside & (other <= slot)
        if reach.window is not None:
            past = past & (key >= _lowest(row, slot % size, reach))
        return ((other < 0) & past) | inside

    return sees


def attend(q, k, v, mask):
    """Attention under a mask of `blocks_mask`.  q [B, HQ, R S, D], k and v [B, HK, T + R S, D]  ->  [B, HQ, R S, D]"""
    return _attend(q, k, v, mask, with_normaliser=False)[0]


@contextlib.contextmanager
def plain_attention():
    """Inside this context attention takes plain products on a GPU too: for a few short rows, which are not worth compiling for."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


_plain = False


def _takes_flex(tensor):
    return tensor.is_cuda and not _plain


@functools.cache
def _compiled(function):
    return torch.compile(function)


def _attend(q, k, v, mask, with_normaliser):
    """Attention over one set of keys; with_normaliser also gives the log of each row's sum of exponentials.

    mask: block_mask on a GPU, _dense_mask elsewhere  ->  ([B, HQ, T, D], fp32 or wider [B, HQ, T] or None)
    """
    if not _takes_flex(q):
        return _attend_dense(q, k, v, mask, with_normaliser)
    if q.dtype not in FLEX_DTYPES or q.shape[-1] < FLEX_LEAST_DIM:
        raise ValueError(
            "on a GPU heads are trained with FlexAttention, which takes float32, bfloat16 or float16 and head dimensions from "
            f"{FLEX_LEAST_DIM}; got {q.dtype} and {q.shape[-1]}: change head_dim, or train on the CPU"
        )
    return _attend_flex(q, k, v, mask, with_normaliser)


def _attend_flex(q, k, v, mask, with_normaliser):
    aux = AuxRequest(lse=True) if with_normaliser else None
    flex, options = _compiled(flex_attention), FLEX_OPTIONS
    found = flex(q, k, v, block_mask=mask, enable_gqa=True, return_aux=aux, kernel_options=options)
    return (found[0], found[1].lse) if with_normaliser else (found, None)


def _attend_dense(q, k, v, mask, with_normaliser):
    if not with_normaliser:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = _wide(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # [B, HQ, T, T]
    # Masked before the exponential: a hidden score far above the visible ones would overflow, and its gradient be 0 * inf.
    scores = scores.masked_fill(~mask, -torch.inf)
    normaliser = scores.logsumexp(-1)
    weights = (scores - normaliser[..., None]).exp()
    return weights.to(v.dtype) @ v, normaliser


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()
