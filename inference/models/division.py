"""Tensor parallelism of a packed decoder: what each of N ranks holds of its weights, and how their results come together.

    division = Division(config, ranks, device_type="cpu")      # ValueError if N ranks cannot hold the heads
    Decoder.from_pretrained(..., division=division)

- q, k, v and gate, up are divided by features: whole heads, and stretches of the intermediate features. Key heads fewer than the
  ranks are held by several. The embedding and lm_head are divided by tokens, the last parts zero-padded.
- o and down are divided along K, in ranges. Their fp32 sums are added as a binary tree: neighbours first, those of one rank by that
  rank, so each hands on one sum; the last ones by the next kernel, as it adds the two ranges of one GPU's product. Where one device
  cuts these products into two ranges, two ranks give its bits; `invariant` cuts them into that many ranges on any N that divides
  it, 1 included (arXiv 2511.17826). Else every rank has one range, and the bits are those of this N alone (`keeps_bits`).
- Norms, and everything after the logits, are computed by every rank.

WHOLE is the division of a decoder that one device holds. Modules of transformers: modules/divided_products.py. Not divided: layers
of heads, draft models.

Letters: M rows, H hidden, I intermediate, V vocabulary, N x K a weight, HQ and HK query and key heads, D head dimension.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from ...kernels.embedding import embed
from ...kernels.jit import on_device
from ...kernels.linear.linear import linear_sums, pack_weight
from ...kernels.linear.linear_table import num_splits, split_depth
from .blocks import Linear
from .transport import ALONE

INVARIANTS = (2, 4, 8)
VOCABULARY = ("embedding", "lm_head")
ALIGNMENT = 16  # a rank's part of the vocabulary is a multiple of this


@dataclass(frozen=True)
class RowParallel:
    """A product whose ranges of K lie on several ranks.

    weights: those of this rank's ranges [N, K of the range], on the CPU in fp32 at least; bias [N]: on rank 0 alone.
    """

    splits = 1  # a range is not cut further
    in_pairs = True  # the tree goes on in the norm

    weights: tuple
    bias: torch.Tensor | None
    ranks: object

    def shares(self, num_rows):
        """Rows of each rank's share of the sums, [N]; None where the ranks do not share them."""
        weight = self.weights[0]
        return self.ranks.shares(num_rows, len(weight), weight.dtype) if len(self.weights) == 1 else None

    def parts(self, x):
        """What the next norm adds up: sums to be added in pairs, at most four where N is a power of two, or their sum.

        x [M, K of this rank] -> [S, M, N], or [1, M, N] in x's dtype, or PeerParts, which the norm gathers, too
        """
        if len(self.weights) == 1:
            total = self.ranks.sum_rows(partial(self._write_sums, x), len(x), self.shape[0], x.dtype)
            if total is not None:
                return total[None]
        part = self._part(x, self.ranks.slot((len(x), self.shape[0]), torch.float32))
        return self.ranks.peer_parts(part) or in_pairs(self.ranks.gather(part), 4)

    def _part(self, x, slot):
        """The sum of this rank's ranges, in the slot if there is one.  -> [M, N]"""
        if len(self.weights) == 1:
            return linear_sums(x, self.weights[0], self.bias, slot)
        start, sums = 0, []
        for weight in self.weights:
            stop = start + weight.shape[1]
            sums.append(linear_sums(x[:, start:stop], weight, None if start else self.bias))
            start = stop
        return torch.add(*in_pairs(torch.stack(sums), 2), out=slot)

    def _write_sums(self, x, rows, out, late):
        linear_sums(x[rows], self.weights[0], self.bias, out, late)

    def packed(self):
        """See Linear.packed."""
        return RowParallel(tuple(map(pack_weight, self.weights)), self.bias, self.ranks)

    @property
    def shape(self):
        """(N, K of this rank)"""
        return self.weights[0].shape[0], sum(weight.shape[1] for weight in self.weights)

    @property
    def nbytes(self):
        """Bytes of this rank's weights."""
        return sum(weight.nbytes for weight in self.weights)


def in_pairs(parts, most):
    """Sums of neighbours, of these and their neighbours, and so on, until at most so many are left.  [S, ...] -> [most, ...]

    All numbers of ranks between which ranges can be divided give the same tree. Where an odd number comes up, that is left.
    """
    while len(parts) > most and len(parts) % 2 == 0:
        parts = parts[0::2] + parts[1::2]
    return parts


class Whole:
    """One device holds everything."""

    ranks = ALONE
    keeps_bits = True
    logits_splits = None  # ranges of K of the product of lm_head, where it is part of a larger one (see Linear)
    cut = None  # what decides bits beside one device's own numerics: numbers of ranges of o and of down

    def heads(self, config):
        """Query heads and key heads that are held."""
        return config.num_attention_heads, config.num_key_value_heads

    def vocab_size(self, config, lm_head):
        """V.  lm_head: what is held"""
        return len(lm_head)

    def rows_of(self, packed, name, count):
        """Which rows of a checkpoint's tensor are held: range(first, end).  packed: the plan's key; count: all rows"""
        return range(count)

    def num_rows(self, packed, name, count):
        """Number of rows they take, padding included."""
        return len(self.rows_of(packed, name, count))

    def columns_of(self, packed):
        """The ranges of a packed tensor's columns that are held, one after the other (slices)."""
        return (slice(None),)

    def take(self, packed, parts, whole):
        """What is held of a packed tensor.  parts: {name: shape}, as in the plan  ->  one tensor for each of columns_of"""
        return [whole]

    def product(self, packed, weights, bias):
        """The product of what is held (columns_of)."""
        return Linear(*weights, bias)

    def embedded(self, tokens, table, multiplier):
        """Rows of the embedding.  tokens [M], table: what is held -> [M, H]"""
        return embed(tokens, table, multiplier)

    def joined_logits(self, logits, out=None):
        """Logits of the whole vocabulary, in `out` if given.  [M, tokens that are held] -> [M, V]"""
        return logits

    def joined(self, table):
        """The whole embedding or lm_head.  [tokens that are held, H] -> [V, H]"""
        return table


WHOLE = Whole()


class Division(Whole):
    """The part of one rank.

    config: the target's; ranks: a group of transport.py; device_type: "cuda" or "cpu"; invariant: None, or one of INVARIANTS.
    Raises ValueError if the ranks do not divide the heads, or cannot keep the invariant.
    """

    def __init__(self, config, ranks, device_type="cpu", invariant=None):
        check_divides(config, ranks.size, invariant)
        self.ranks, self.config, self.invariant = ranks, config, invariant
        self._on_gpu, size = device_type == "cuda", ranks.size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_rank = -(-config.vocab_size // size)
        self.vocab_rows = -(-per_rank // ALIGNMENT) * ALIGNMENT
        hidden, inner = config.hidden_size, config.intermediate_size
        out, same_out = self._ranges(hidden, config.num_attention_heads * self.head_dim, by_heads=True)
        down, same_down = self._ranges(hidden, inner, by_heads=False)
        self.keeps_bits = same_out and same_down
        if invariant or not self.keeps_bits:
            self.cut = [len(out) * size, len(down) * size]
        self._columns = {"out.weight": out, "down.weight": down}
        self._splits = {}  # of products whose features are divided: those of the whole
        if self._on_gpu:
            heads = config.num_attention_heads + 2 * config.num_key_value_heads
            self._splits = {"qkv": num_splits(heads * self.head_dim, hidden), "gate_up": num_splits(2 * inner, hidden)}
            self.logits_splits = num_splits(config.vocab_size, hidden)
        self._inner = range(down[0].start, down[-1].stop)
        self._heads = self._share(config.num_attention_heads)
        self._kv_heads = self._share(config.num_key_value_heads)

    def _share(self, heads):
        """Which of so many heads are this rank's."""
        first = self.ranks.rank * heads // self.ranks.size
        return range(first, max((self.ranks.rank + 1) * heads // self.ranks.size, first + 1))

    def _ranges(self, features, depth, by_heads):
        """This rank's ranges of a product [N, K], and whether they are those of one device, or of the invariant.

        by_heads: they must end where this rank's heads end
        """
        rank, size = self.ranks.rank, self.ranks.size
        count = self.invariant or (num_splits(features, depth) if self._on_gpu else 1)
        # One device adds more than two ranges from the first to the last, and not as a tree.
        same = count % size == 0 and (self.invariant is not None or count <= 2)
        if same:
            borders, each = self._borders(depth, count), count // size
            same = not by_heads or all(borders[r * each] == r * depth // size for r in range(size))
        if not same:
            borders, each = self._borders(depth, size), 1
            if by_heads:
                borders = [r * depth // size for r in range(size + 1)]
        own = borders[rank * each : (rank + 1) * each + 1]
        return [slice(*pair) for pair in pairwise(own)], same

    def _borders(self, depth, count):
        """Where `count` ranges of K begin and end: on a GPU those of `linear`, if none of them is empty; else even ones."""
        step = split_depth(depth, count)
        if self._on_gpu and step * (count - 1) < depth:
            return [min(i * step, depth) for i in range(count + 1)]
        return [i * depth // count for i in range(count + 1)]

    def heads(self, config):
        return len(self._heads), len(self._kv_heads)

    def vocab_size(self, config, lm_head):
        return config.vocab_size

    def rows_of(self, packed, name, count):
        kind, dim = packed.split(".")[-2:][0], self.head_dim
        if packed in VOCABULARY:
            first = self.ranks.rank * self.vocab_rows
            return range(min(first, count), min(first + self.vocab_rows, count))
        if kind == "qkv":
            heads = self._heads if ".q_proj." in name else self._kv_heads
            return range(heads.start * dim, heads.stop * dim)
        return self._inner if kind == "gate_up" else range(count)

    def num_rows(self, packed, name, count):
        return self.vocab_rows if packed in VOCABULARY else len(self.rows_of(packed, name, count))

    def columns_of(self, packed):
        return self._columns.get(packed.split(".", 2)[-1], (slice(None),))

    def take(self, packed, parts, whole):
        rows, start = [], 0
        for name, (count, *_) in parts.items():
            own = self.rows_of(packed, name, count)
            rows.append(whole[start + own.start : start + own.stop])
            start += count
        held = torch.cat(rows)
        if packed in VOCABULARY:
            held = F.pad(held, (0, 0, 0, self.vocab_rows - len(held)))
        return [held[..., columns].contiguous() for columns in self.columns_of(packed)]

    def product(self, packed, weights, bias):
        name = packed.split(".")[-1]
        if f"{name}.weight" not in self._columns:
            return Linear(*weights, bias, self._splits.get(name))
        bias = bias if self.ranks.rank == 0 else None

        def wide(x):
            # Sums of ranges are fp32, and the CPU's products have the dtype of their operands.
            return x if x is None or self._on_gpu else x.to(torch.promote_types(x.dtype, torch.float32))

        return RowParallel(tuple(map(wide, weights)), wide(bias), self.ranks)

    def embedded(self, tokens, table, multiplier):
        tokens = tokens.long()
        self.ranks.begin()
        # A token of another rank reads some row here, which is not chosen.
        found = self.ranks.gather(embed(tokens % self.vocab_rows, table, multiplier))  # [size, M, H]
        return found[tokens // self.vocab_rows, torch.arange(len(tokens), device=tokens.device)]

    def joined_logits(self, logits, out=None):
        self.ranks.begin()
        parts = self.ranks.gather(logits)  # [size, M, vocab_rows]
        whole = parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size]
        # A copy in any case: of one row the parts are whole already, in a buffer of the ranks.
        return (logits.new_empty(whole.shape) if out is None else out).copy_(whole)

    def joined(self, table):
        with on_device(table.device):
            self.ranks.begin()
            return self.ranks.gather(table).flatten(0, 1)[: self.config.vocab_size].clone()


def check_divides(config, size, invariant=None):
    """ValueError, saying what would fit, unless so many ranks divide the heads of a target, and keep the invariant."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def divides(number):
        return heads % number == 0 and (kv_heads % number == 0 or number % kv_heads == 0)

    if not divides(size):
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if divides(number))
        raise ValueError(
            f"tensor_parallel_size={size} does not divide the {heads} query heads on {kv_heads} key heads of this "
            f"{config.model_type} model: every rank takes whole heads; {fitting} would fit"
        )
    if invariant is not None and (invariant % size or heads % invariant):
        fitting = [number for number in INVARIANTS if number % size == 0 and heads % number == 0]
        advice = f"give one of {', '.join(map(str, fitting))}" if fitting else "leave it out"
        raise ValueError(
            f"tensor_parallel_invariant={invariant} cuts products into {invariant} ranges: it must be a multiple of "
            f"tensor_parallel_size={size} and divide the {heads} query heads of this {config.model_type} model; {advice}"
        )
