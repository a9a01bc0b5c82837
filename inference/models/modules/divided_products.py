"""Products of a module whose output features several ranks divide: each computes its own, for all rows, and all are gathered.

    division = FeatureDivision(ranks)
    with division.taking_experts(device):                # of a mixture's weights, as they are read, only this rank's rows are kept
        module = AutoModelForCausalLM.from_pretrained(folder)
    packed = division.divide(module, groups, trial, device)  # {id of a weight: DividedWeight, or a ProductGroup of one}

A feature's bits do not depend on the features beside it (divided_weight.py). So any number of ranks gives the bits of one device,
whatever the module does between its products. Everything else, attention and its cache included, is computed by every rank, from
weights that are held whole: embeddings, norms, and products too small to gain. Of a tied lm_head a rank multiplies its rows.

Letters: M rows, N x K a weight, n features of one rank, E experts, R ranks.
"""

from contextlib import contextmanager
from threading import get_ident

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..divided_weight import DividedWeight, is_small, new_of_ranks, rows_of_rank
from .expert_modules import expert_weights, is_gated, is_weight_of_experts
from .product_groups import ProductGroup, is_product, pack_products, tied_weights


class FeatureDivision:
    """The part of one rank of a module.  ranks: a group of transport.py"""

    keeps_bits, cut = True, None  # see Division

    def __init__(self, ranks):
        self.ranks = ranks
        self._experts = {}  # {id of a parameter: (what is held of it, a Parameter, and its DividedWeight)}

    def rows_of(self, features):
        """Which of so many features are this rank's: range(first, end)."""
        return rows_of_rank(features, self.ranks.rank, self.ranks.size)

    def joined_rows(self, table, count):
        """A weight [N, K] of all ranks, which call this together.  table: [n, K] of this rank; count: N"""
        return torch.cat(
            [part[new] for part, new in zip(self.ranks.gather(table), new_of_ranks(count, self.ranks.size))]
        )

    def held_bytes(self, module, dtype):
        """Bytes in dtype of the parameters of a module (on `meta`) that a rank holds, or more: groups count as their members."""
        found = {id(parameter): parameter.numel() * dtype.itemsize for parameter in module.parameters()}
        embedding = module.get_input_embeddings().weight
        for weight in (weight for part in module.modules() for weight in _weights_of(part)):
            if not is_small(found[id(weight)]) and weight is not embedding:
                found[id(weight)] = -(-weight.numel() // self.ranks.size) * dtype.itemsize
        return sum(found.values())

    # --- mixtures of experts: as they are read ---

    @contextmanager
    def taking_experts(self, device):
        """Inside this context weights of experts that a module is given are replaced by this rank's part, on the device."""

        thread = get_ident()  # the hook is the process's: another thread may load another model

        def replace(module, name, parameter):
            if parameter is None or parameter.is_meta or get_ident() != thread:
                return None
            return self.take_experts(module, name, parameter, device)

        hook = register_module_parameter_registration_hook(replace)
        try:
            yield
        finally:
            hook.remove()

    def take_experts(self, module, name, weight, device):
        """A Parameter of this rank's part of a module's weights [E, N, K] (transposed: [E, K, N]); None if it is held whole."""
        if not is_weight_of_experts(module, name) or is_small(weight.nbytes) or id(weight) in self._experts:
            return None
        self.ranks.check()
        whole = weight.data.mT if module.is_transposed else weight.data  # [E, N, K]
        stretches = 2 if is_gated(module, name) else 1
        width = whole.shape[1] // stretches
        rows = self.rows_of(width)
        held = whole.unflatten(1, (stretches, width))[:, :, rows.start : rows.stop]
        held = held.flatten(1, 2).contiguous().to(device)  # [E, h n, K]
        found = nn.Parameter(held.mT if module.is_transposed else held, requires_grad=False)
        found._is_hf_initialized = True  # transformers' mark: it would make other values
        self._experts[id(found)] = found, DividedWeight(held, tuple(whole.shape[1:]), stretches, self.ranks)
        return found

    # --- everything else: once it is known which products are one ---

    def divide(self, module, groups, trial, device):
        """Put this rank's rows in the place of the module's large weights, and pack what is small.

        groups: names of linears that are one product; trial: the Trial of this module with these packed; device: where everything
        goes (meta for an outline)
        ->  {id of a weight: ProductGroup, or DividedWeight of one alone, or of experts}
        """
        grouped, tied = {name for names in groups for name in names}, tied_weights(module)
        small, large = [], []
        for names in (*groups, *([name] for name in trial.multiplied if name not in grouped)):
            parts = [module.get_submodule(name) for name in names]
            (small if is_small(sum(part.weight.nbytes for part in parts)) else large).append((names, parts))
        taken = []  # (Linears of one product, this rank's part of it, how many rows each has)
        for names, parts in large:
            self.ranks.check()
            if id(parts[0].weight) not in tied:
                taken.append((parts, *self._take(parts, 2 if names[0] in trial.gated else 1, device)))
        module.to(device)
        packed = {id(held): divided for held, divided in self._experts.values()}
        packed |= pack_products(module, [names for names, _ in small if len(names) > 1])
        for _, (first, *_) in large:
            if (
                id(first.weight) in tied
            ):  # others read it, too (an embedding): it stays whole, and this rank multiplies its rows
                packed[id(first.weight)] = DividedWeight.of(_rows_of(first).contiguous(), self.ranks)
        for parts, divided, sizes in taken:
            packed |= _packed(parts, divided, sizes)
        return packed

    def _take(self, parts, stretches, device):
        """This rank's rows of the weights of one product, which the module gives up, and how many rows the weights have."""
        weights = [_rows_of(part) for part in parts]
        sizes = [len(weight) for weight in weights]
        shape = sum(sizes), weights[0].shape[1]
        width, pieces = shape[0] // stretches, []
        own = self.rows_of(width)
        for stretch in range(stretches):
            first, last = stretch * width + own.start, stretch * width + own.stop
            start = 0
            for weight in weights:
                pieces.append(weight[max(first - start, 0) : max(last - start, 0)].to(device))
                start += len(weight)
        for part in parts:
            part.weight = nn.Parameter(part.weight.new_empty(0, device=device), requires_grad=False)
        return DividedWeight(torch.cat(pieces), shape, stretches, self.ranks), sizes


def _packed(parts, divided, sizes):
    """{id of a weight: DividedWeight, or the ProductGroup of several}.  sizes: how many rows each of the Linears has"""
    if len(parts) == 1:
        return {id(parts[0].weight): divided}
    b = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = {id(part.weight): span for part, *span in zip(parts, starts, sizes)}
    return dict.fromkeys(spans, ProductGroup(divided, b, spans))


def _rows_of(part):
    """The weight [N, K] of a Linear or a Conv1D."""
    return part.weight.data if isinstance(part, nn.Linear) else part.weight.data.t()


def _weights_of(part):
    """The weights of a module that can be divided."""
    return [part.weight] if is_product(part) else expert_weights(part)
