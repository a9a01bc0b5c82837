"""Run a module of transformers so that a row's bits do not depend on the other rows: every operation is accounted for.

    with RowOps():
        module(...)              # rows lie along the dimensions before the last

Inside, operations on rows pass if they work element by element or only move data; products, sums, norms, softmax and top-k run on
ops of ours that add each row in one order; any other operation raises UnsupportedOperation with its name. Rows must not be mixed:
a sum over another dimension than the last is refused.

Products, residual additions and what may become one kernel with its neighbours are deferred (fused_ops.py): the result of a pass
may be a Deferred, which `computed` turns into a tensor.

On a CPU the library computes most functions of single elements twice: for whole vector registers, and for the elements left over,
with other bits. Here they are computed on whole registers (`in_whole_vectors`).
"""

import functools
import weakref
from collections import Counter

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ....kernels.row_sum import row_softmax, row_sum
from ....kernels.row_top import row_top, row_top_reference
from ..divided_weight import DividedWeight
from .deferred import VIEWS, Deferred, Product, columns, computed, viewed
from .fused_ops import FUSED

# They move or make data, compare, or round once per element: the same bits wherever an element stands.
EXACT = {
    "__and__", "__or__", "_to_copy", "_unsafe_view", "abs", "add", "add_", "alias", "arange", "bitwise_and", "bitwise_not",
    "bitwise_or", "cat", "ceil", "chunk", "clamp", "clamp_max", "clamp_min", "clone", "concat", "constant_pad_nd",
    "contiguous", "copy_", "detach", "div", "div_", "dropout", "embedding", "empty", "empty_like", "eq", "expand",
    "expand_as", "fill_", "flatten", "floor", "full", "full_like", "gather", "ge", "gt", "index", "index_select", "le",
    "lift_fresh", "logical_and", "logical_not", "logical_or", "lt", "mT", "masked_fill", "masked_fill_", "maximum",
    "minimum", "mul", "mul_", "narrow", "ne", "neg", "new_empty", "new_full", "new_zeros", "numpy_T", "ones", "ones_like",
    "pad", "permute", "reciprocal", "relu", "repeat", "repeat_interleave", "reshape", "resolve_conj", "resolve_neg",
    "round", "rsqrt", "rsub", "scalar_tensor", "scatter", "scatter_", "select", "slice", "split", "split_with_sizes",
    "sqrt", "square", "squeeze", "stack", "sub", "sub_", "t", "to", "transpose", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "where", "zeros", "zeros_like",
}  # fmt: skip
# Functions of single elements whose bits depend, on a CPU, on whether an element fills a vector register with others.
ELEMENTWISE = {
    "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "hardswish", "leaky_relu", "log", "log1p", "log_sigmoid", "mish", "pow",
    "sigmoid", "silu", "silu_", "sin", "softplus", "tanh",
}  # fmt: skip
REGISTER = 64  # elements: a multiple of those in any vector register
BLOCK = 16384  # elements computed at once: few enough for one thread, which would else cut them elsewhere


class UnsupportedOperation(ValueError):
    """An operation that may mix rows, or add a row in an order that depends on the others."""


class RowOps(TorchDispatchMode):
    """See the module.  groups: {id of a weight: ProductGroup or DividedWeight}"""

    def __init__(self, groups=None):
        super().__init__()
        self.groups = groups or {}
        self.products = (
            set()
        )  # shapes [N, K] of the weights that were multiplied, and their ranges of K if they are parts
        self.mixtures = set()  # (experts of a row, experts) of the mixtures that were computed
        self.fused = Counter()  # kernels that did the work of several operations
        self.calls, self.wishes = [], []  # (rows, weight) of each product; weights that one product should have
        self.gated = []  # weights of gated MLPs that are one kernel
        # {number: source}, some of which are not computed yet, in their order: on several ranks each computes them in the same one
        self._pending = weakref.WeakValueDictionary()
        self._num_deferred = 0
        self._grouped = {}  # {group: (its product, weights of its members that have not taken their part)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if _has_out(function):
            raise UnsupportedOperation(
                f"it uses {name} with out=, which writes to a tensor that may not be computed yet"
            )
        if name in VIEWS and isinstance(args[0], Deferred):
            found = viewed(args[0], function, args[1:], kwargs)
            if found is not None:
                return found
        if name in FUSED:
            found = FUSED[name](self, function, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if name.endswith("_") and not name.endswith("__"):
            self._settle()
        args, kwargs = computed(tuple(args)), computed(kwargs)
        if name in ROW_OPS and _is_floating(args):
            return ROW_OPS[name](self, *args, **kwargs)
        if name in ELEMENTWISE:
            return in_whole_vectors(function, *args, **kwargs)
        if name in EXACT and kwargs.get("alpha", 1) == 1:
            return function(*args, **kwargs)
        raise UnsupportedOperation(f"it uses {name}, which may give a row other bits in other company")

    # --- what is deferred ---

    def defer(self, source):
        """A Deferred of a new source."""
        self._pend(source)
        return Deferred(source)

    def _pend(self, source):
        self._pending[self._num_deferred] = source
        self._num_deferred += 1

    def _settle(self):
        """Compute all that is deferred: something is about to be written to that it may read.

        What is made of it afterwards reads the values, which may be what is written to. So it goes on `meta`, and a pass fuses what
        the trial fused.
        """
        for source in list(self._pending.values()):
            source.value()
            source.settled = True
        self._pending.clear()
        self._grouped.clear()

    def product(self, x, w, b=None, is_transposed=False):
        """x W^T + b; of a group, that member's part of the product of all, which is computed once for the same x.

        is_transposed: w is [K, N]
        """
        if x.is_meta:
            self.calls.append((x, w))
        group = self.groups.get(id(w))
        if isinstance(group, DividedWeight):
            return self._alone(x, group, b)
        span = group and group.span(w, b)
        if not span:
            return self._alone(x, w.t().contiguous() if is_transposed else w, b)
        self.products.add(shape_of_launch(group.w))
        product, waiting = self._grouped.get(group, (None, ()))
        if product is None or product.given is not x:
            product, waiting = Product(x, group.w, group.b), set(group.spans)
            self._pend(product)
            self.fused["product"] += 1
        waiting.discard(id(w))
        self._grouped[group] = product, waiting
        if not waiting:
            del self._grouped[group]
        return viewed(Deferred(product), torch.ops.aten.narrow.default, (-1, *span))

    def _alone(self, x, w, b):
        self.products.add(shape_of_launch(w))
        return self.defer(Product(x, w, b))

    def wish(self, products):
        """Products of the same rows, each of them whole, that a fused kernel would take as one."""
        sources = [one.source for one in products]
        if all(one.given is sources[0].given for one in sources) and all(
            columns(one) == (0, one.source.w.shape[0]) for one in products
        ):
            self.wishes.append([one.w for one in sources])

    def elementwise(self, function):
        return functools.partial(in_whole_vectors, function)

    def check_last(self, name, x, shape):
        if list(shape) != [x.shape[-1]]:
            raise UnsupportedOperation(f"it uses {name} over more than the last dimension")


def shape_of_launch(w):
    """What decides the launches of a product: (N, K), and the ranges of K of a part of a larger weight."""
    return (*w.w.shape, w.splits) if isinstance(w, DividedWeight) else tuple(w.shape)


@functools.cache
def _has_out(function):
    """Whether an overload writes its result where it is told."""
    return any(argument.is_out for argument in function._schema.arguments)


def _is_floating(args):
    return torch.is_tensor(args[0]) and args[0].is_floating_point()


def in_whole_vectors(function, x, *args, **kwargs):
    """An elementwise function of x, every element computed in a full vector register. On a GPU there is nothing to do."""
    if x.device.type != "cpu" or not x.is_floating_point() or not x.numel():
        return function(x, *args, **kwargs)
    flat = x.contiguous().view(-1)
    padded = F.pad(flat, (0, -len(flat) % REGISTER))
    found = [function(block.clone(), *args, **kwargs) for block in padded.split(BLOCK)]
    found = torch.cat(found)[: len(flat)].view(x.shape)
    return x.copy_(found) if function._schema.name.endswith("_") else found


# --- the operations that add up a row ---


def _rows(x):
    return x.reshape(-1, x.shape[-1])


def _addmm(mode, b, x, w, beta=1, alpha=1):
    """b + x w, with w [K, N] as Conv1D has it."""
    if (beta, alpha) != (1, 1):
        raise UnsupportedOperation("it uses addmm with factors")
    return mode.product(x, w, b, is_transposed=True)


def _matmul(mode, x, w):
    if x.shape[-1] == 1 and x.dim() == w.dim() > 1:
        return x * w  # an outer product adds nothing up
    if w.dim() != 2:
        raise UnsupportedOperation("it uses matmul of two batches of matrices")
    return mode.product(x, w.t().contiguous())


def _check_last(name, x, dims):
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    if [dim % x.dim() for dim in dims] != [x.dim() - 1]:
        raise UnsupportedOperation(f"it uses {name} over other dimensions than the last, which may mix rows")


def _sum(mode, x, dim=None, keepdim=False, dtype=None, name="sum", divisor=1):
    _check_last(name, x, dim)
    total = row_sum(_rows(x).to(dtype or x.dtype))
    total = total if divisor == 1 else total / divisor
    return total.view(*x.shape[:-1], *([1] if keepdim else [])).to(dtype or x.dtype)


def _mean(mode, x, dim=None, keepdim=False, dtype=None):
    return _sum(mode, x, dim, keepdim, dtype, "mean", x.shape[-1])


def _softmax(mode, x, dim, dtype=None):
    _check_last("softmax", x, dim)
    # Half precision is widened as it is read.
    narrow = dtype is None or (dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16))
    return row_softmax(_rows(x if narrow else x.to(dtype))).view(x.shape).to(dtype or x.dtype)


def _topk(mode, x, k, dim=-1, largest=True, sorted=True):
    """The k greatest of each row, ties to the lowest place."""
    _check_last("topk", x, dim)
    if not largest:
        raise UnsupportedOperation("it uses topk for the least")
    top = row_top_reference if x.is_meta or x.dtype == torch.float64 else row_top
    return tuple(found.view(*x.shape[:-1], k) for found in top(_rows(x), k))


def _extreme(function):
    def extreme(mode, x, *args, **kwargs):
        dim = args[0] if args else kwargs.get("dim")
        if not torch.is_tensor(dim):
            _check_last("max or min", x, dim)
        return function(x, *args, **kwargs)

    return extreme


ROW_OPS = {
    "addmm": _addmm,
    "bmm": _matmul,
    "mm": _matmul,
    "matmul": _matmul,
    "sum": _sum,
    "mean": _mean,
    "softmax": _softmax,
    "topk": _topk,
    "max": _extreme(torch.max),
    "min": _extreme(torch.min),
    "amax": _extreme(torch.amax),
    "amin": _extreme(torch.amin),
}
