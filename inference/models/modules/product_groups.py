"""Linears of a module that read the same rows, as one product: their weights lie one after the other, and there is no second copy.

Which ones is seen in the trial, by what they read and what is made of them: q, k and v of an attention, gate and up of an MLP, in
the order that the fused kernels take; and other linears of one module that read the same.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..divided_weight import DividedWeight
from .module_outline import has_hooks


@dataclass(frozen=True, eq=False)
class ProductGroup:
    """Linears whose weights are one.  w [N, K], b [N] or None; spans: {id of a weight: (first row, rows)}

    w may be a DividedWeight, of a module that is nobody else's.
    """

    w: object
    b: torch.Tensor | None
    spans: dict

    def span(self, w, b):
        """(first row, rows) of a member's weight and bias; None if the module has been given others since."""
        first, rows = self.spans[id(w)]
        if isinstance(self.w, DividedWeight):
            return first, rows
        return (first, rows) if _lies_in(self.w, w, first) and _lies_in(self.b, b, first) else None


def _lies_in(whole, part, first):
    """Whether a part is that of the whole which begins with this row. Both may be None."""
    if whole is None or part is None:
        return whole is part
    own = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return own and part.storage_offset() == whole.storage_offset() + first * whole.stride(0)


def is_product(part):
    """Whether a module multiplies rows by its weight, and does nothing else."""
    from transformers.pytorch_utils import Conv1D

    return type(part) in (nn.Linear, Conv1D)


def groups_of(module, calls, wishes):
    """Names of the linears that should be packed, [[name]], in the order of their weights.

    calls: (x, weight) of each product of the trial, in order; wishes: weights that fused kernels would take together
    """
    counts = {}
    for _, w in calls:
        counts[id(w)] = counts.get(id(w), 0) + 1
    shared = tied_weights(module) | {name for name, count in counts.items() if count > 1}
    linears = {
        id(part.weight): (name, part)
        for name, part in module.named_modules()
        if type(part) is nn.Linear
        and id(part.weight) not in shared
        and not has_hooks(part)  # which may change what it reads
    }
    found, taken = [], set()

    def take(weights):
        parts = [linears.get(id(w)) for w in weights]
        if None in parts or taken & set(map(id, weights)) or len(parts) < 2:
            return
        if len({_kind(part) for _, part in parts}) == 1:
            taken.update(map(id, weights))
            found.append([name for name, _ in parts])

    for weights in wishes:
        take(weights)
    readers = {}
    for x, w in calls:
        if id(w) in linears and id(w) not in taken:
            name, part = linears[id(w)]
            readers.setdefault((id(x), name.rpartition(".")[0], _kind(part)), []).append(w)
    for weights in readers.values():
        take(weights)
    return found


def _kind(linear):
    """What linears of one product have in common."""
    return linear.in_features, linear.weight.dtype, linear.bias is None


def tied_weights(module):
    """Ids of parameters that several modules share."""
    seen, tied = set(), set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def pack_products(module, groups):
    """Lay the weights of each group out as one, in place of the originals.

    groups: [[name of a linear]]  ->  {id of a weight: ProductGroup}
    """
    found = {}
    for names in groups:
        parts = [module.get_submodule(name) for name in names]
        w = _as_one([part.weight for part in parts])
        b = None if parts[0].bias is None else _as_one([part.bias for part in parts])
        spans, first = {}, 0
        for part in parts:
            spans[id(part.weight)] = first, len(part.weight)
            first += len(part.weight)
        found |= dict.fromkeys(spans, ProductGroup(w, b, spans))
    if any(group.w.is_cuda for group in found.values()):
        torch.cuda.empty_cache()  # the places that the weights have left fit no other group
    return found


def _as_one(parameters):
    """The parameters one after the other, each of them a slice of it from now on. Nothing moves if they lie so already."""
    first, length = parameters[0], sum(len(one) for one in parameters)
    place, together = first.storage_offset(), True
    for one in parameters:
        together &= one.is_contiguous() and one.storage_offset() == place
        together &= one.untyped_storage()._cdata == first.untyped_storage()._cdata
        place += one.numel()
    if together:
        return first.data.as_strided((length, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([one.data for one in parameters])
    for one, part in zip(parameters, whole.split([len(one) for one in parameters])):
        one.data = part
    return whole
