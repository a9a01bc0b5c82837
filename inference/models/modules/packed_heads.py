"""q, k and v that are parts of one product: from the product to the cache in one kernel (kernels/attention/rotary_kv_write.py).

Between the product and attention a module may norm each head, rotate q and k, and scale q. All of that was deferred (fused_ops.py).
Here it is read back from what attention is handed, and compared with what the kernel does: the order of the heads in the product,
the same rotation of q and k, the same eps. Whatever else a module does is computed by its own operations.

Letters: M rows, HQ and HK query and key heads, D head dimension, N columns of the product.
"""

from dataclasses import dataclass, replace

import torch

from ....kernels.attention.rotary_kv_write import rotary_kv_write
from .deferred import Call, Deferred, Product, computed, is_source, replayed
from .fused_ops import same_view


@dataclass(frozen=True)
class Heads:
    """Heads of a product, as attention takes them, and what is done to them on the way."""

    product: Product = None
    first: int = 0  # their first column
    num: int = 0
    dim: int = 0
    norm: torch.Tensor | None = None  # [D]
    eps: float = 0.0
    angles: tuple | None = None  # cos and sin, [M, D] each
    multiplier: float = 1.0


def heads_of(x):
    """The Heads that x [1, heads, M, D] is; None if it is something else."""
    found, before = Heads(), ("mul", "rotated", "rms_norm")  # what may still come, from the outside in
    while isinstance(x, Deferred) and is_source(x, Call):
        call = x.source
        if call.name not in before:
            return None
        before = before[before.index(call.name) + 1 :]
        if call.name == "mul":
            inner, factor = call.args
            if not isinstance(factor, int | float):
                return None
            found = replace(found, multiplier=float(factor))
        elif call.name == "rotated":
            inner, cos, sin = call.about
            angles = _angles(cos, x), _angles(sin, x)
            if None in angles or x.shape[-1] != inner.shape[-1]:
                return None
            found = replace(found, angles=angles)
        else:
            inner, norm = call.args
            if x.shape[-1] != inner.shape[-1]:
                return None
            found = replace(found, norm=norm, eps=call.about)
        x = replayed(x.views, inner)
    if not is_source(x, Product) or x.dim() != 4 or x.shape[0] != 1:
        return None
    _, num, rows, dim = x.shape
    product, strides = x.source, zip(x.shape[1:], x.outline.stride()[1:], (dim, x.source.w.shape[0], 1))
    if rows != len(product.rows) or any(size > 1 and step != expected for size, step, expected in strides):
        return None
    return replace(found, product=product, first=x.outline.storage_offset(), num=num, dim=dim)


def _angles(table, x):
    """cos or sin as [M, D] for x [1, heads, M, D], which was rotated as that or as [1, M, heads, D]; None for other tables.

    Which of the two is told by the strides: shapes alone would not tell rows from heads where there are as many.
    """
    rotated, rows, dim = x.source.outline, x.shape[-2], x.shape[-1]
    if x.dim() != 4 or rotated.dim() != 4 or not table.is_contiguous():
        return None
    for place, layout in ((2, (1, 1, rows, dim)), (1, (1, rows, 1, dim))):
        is_rows = rotated.shape[place] == rows and (rows == 1 or rotated.stride(place) == x.outline.stride(2))
        if is_rows and tuple(table.shape) in (layout, layout[1:]):
            return table.view(rows, dim)
    return None


@dataclass(frozen=True)
class PackedHeads:
    """q, k and v of one product."""

    q: Heads
    k: Heads

    def write(self, cache_rows, layer_kv, shared):
        """Keys and values go into the cache; see rotary_kv_write.  -> q [M, HQ, D]"""
        q, k = self.q, self.k
        cos, sin = q.angles or (None, None)
        return rotary_kv_write(
            q.product.parts(),
            positions=None,
            cos=cos,
            sin=sin,
            cache_rows=cache_rows,
            layer_kv=layer_kv,
            num_heads=q.num,
            num_kv_heads=k.num,
            q_norm=q.norm,
            k_norm=k.norm,
            eps=q.eps or k.eps,
            shared=shared,
            q_multiplier=q.multiplier,
        )


def packed_heads(mode, query, key, value):
    """The PackedHeads that query [1, HQ, M, D], key and value [1, HK, M, D] are, or None.

    Where they would be if the weights of three products were one, that is wished of the mode.
    """
    q, k, v = (heads_of(x) for x in (query, key, value))
    if q is None or k is None or v is None or q.dim % 2 or not q.dim == k.dim == v.dim or k.num != v.num:
        return None
    plain = replace(v, norm=None, eps=0.0, angles=None, multiplier=1.0)
    if v != plain or k.multiplier != 1 or not _alike(q, k):
        return None
    products = [one.product for one in (q, k, v)]
    if len(set(map(id, products))) == 3:
        mode.wish([Deferred(product) for product in products])
        return None
    ends = q.num * q.dim, (q.num + k.num) * q.dim, (q.num + 2 * k.num) * q.dim
    if (q.first, k.first, v.first, q.product.w.shape[0]) != (0, *ends) or not q.product is k.product is v.product:
        return None
    mode.fused["heads"] += 1
    return PackedHeads(q, k)


def _alike(q, k):
    """Whether q and k are rotated by the same angles, and normed with the same eps if they are normed."""
    if (q.angles is None) != (k.angles is None) or (q.norm is not None and k.norm is not None and q.eps != k.eps):
        return False
    if q.norm is not None and q.norm.dtype != q.product.outline.dtype:
        return False
    pairs = zip(q.angles or (), k.angles or ())
    return all(a.untyped_storage()._cdata == b.untyped_storage()._cdata and same_view(a, b) for a, b in pairs)


def rows_of_heads(x):
    """x [1, heads, M, D] as rows of heads [M, heads, D]."""
    return computed(x)[0].transpose(0, 1)
