"""Results that are computed when they are needed, so that operations in a row become one kernel.

A `Source` is the result of an operation; it is computed once, when its value is first asked for. A `Deferred` is a tensor without
contents that stands for a source, or for a view of it, and remembers the views that led to it. An operation that knows what to
make of a source looks into it: a norm adds the parts of a product itself. Any other operation takes the value (`computed`), and
everything is as if it had been computed at once.

On `meta` nothing has contents, and the same goes on, so a trial on meta finds the fusions without weights.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ....kernels.linear.linear import add_parts, linear, linear_parts
from ..divided_weight import DividedWeight

# Operations that give a view where the strides allow it.
VIEWS = {
    "_unsafe_view", "alias", "chunk", "contiguous", "detach", "dropout", "flatten", "mT", "narrow", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip


class Source:
    """The result of an operation.  outline: a tensor on `meta` that has its shape, strides and dtype"""

    def __init__(self, outline, device):
        self.outline, self.device, self._value = outline, device, None
        self.settled = (
            False  # something was written to since: only its value counts, which may have been changed in place
        )

    def compute(self):
        """The result."""
        raise NotImplementedError

    def value(self):
        if self._value is None:
            with _disable_current_modes():  # it is exact by itself
                self.keep(self.compute())
        return self._value

    def keep(self, value):
        """This is the result: nothing else that was to become it is needed any more."""
        strides = self.outline.stride()
        if any(size > 1 and a != b for size, a, b in zip(value.shape, value.stride(), strides)):
            value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
        self._value = value


class Product(Source):
    """x W^T + b.  given: x as it was handed over [.., K], w [N, K] or a DividedWeight, b [N] or None  ->  [.., N]"""

    def __init__(self, given, w, b):
        x = computed(given)
        super().__init__(torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype, device="meta"), x.device)
        self.given, self.rows, self.w, self.b = given, x.reshape(-1, x.shape[-1]), w, b
        self._parts = None

    def parts(self):
        """Partial sums that the next kernel adds.  -> [S, M, N]"""
        if self._value is not None:
            return self._value.view(1, len(self.rows), -1)
        if self._parts is None:
            self._parts = self._new_parts()
        return self._parts

    def _new_parts(self):
        divided = isinstance(self.w, DividedWeight)
        if self.rows.is_meta:
            w = torch.empty(self.w.shape, dtype=self.w.dtype, device="meta") if divided else self.w
            return torch.nn.functional.linear(self.rows, w, self.b)[None]
        return self.w.product(self.rows, self.b)[None] if divided else linear_parts(self.rows, self.w, self.b)

    def compute(self):
        return add_parts(self.parts(), self.outline.dtype).view(self.outline.shape)

    def keep(self, value):
        super().keep(value)
        self._parts = None

    def write(self, out):
        """The result in `out` [M, N]."""
        if self._value is None and out.is_cuda and out.dtype == self.outline.dtype and out.is_contiguous():
            if isinstance(self.w, DividedWeight):
                return self.w.product(self.rows, self.b, out)
            return linear(self.rows, self.w, self.b, out=out)
        return out.copy_(self.value().view(out.shape))


class Call(Source):
    """function(*args), where the first argument is deferred. Its result is laid out like that argument.

    name: of the operation, by which others know it; about: what else they want to know
    """

    def __init__(self, name, function, args, about=None):
        super().__init__(_dense(args[0].outline), args[0].source.device)
        self.name, self.function, self.args, self.about = name, function, args, about

    def compute(self):
        return self.function(*computed(self.args))


def _dense(outline):
    """An outline with the same order of dimensions in memory and no gaps: that of an elementwise result.

    torch.empty_like gives the same, and takes longer than a kernel on `meta`.
    """
    shape, strides, step = outline.shape, [0] * outline.dim(), 1
    for dim in sorted(range(outline.dim()), key=lambda dim: (outline.stride(dim), -dim)):
        strides[dim], step = step, step * shape[dim]
    return torch.empty_strided(shape, strides, dtype=outline.dtype, device="meta")


class Sum(Source):
    """residual + x; the norm after it computes both (`normed`)."""

    def __init__(self, function, residual, x):
        super().__init__(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.device)
        self.function, self.residual, self.x = function, residual, x

    def compute(self):
        return self.function(computed(self.residual), computed(self.x))

    def keep(self, value):
        super().keep(value)
        self.residual = self.x = None

    def normed(self, add_norm):
        """The norm of the sum, or None if it is known already: then there is nothing to add.

        add_norm(parts [S, M, H] or x [M, H], residual [M, H], multiplier) -> normed [M, H], sum [M, H]
        """
        if self._value is not None:
            return None
        with _disable_current_modes():
            parts, multiplier = _addend(self.x)
            width = self.outline.shape[-1]
            normed, total = add_norm(parts, computed(self.residual).reshape(-1, width), multiplier)
            self.keep(total.view(self.outline.shape))
        return normed


def _addend(x):
    """What a norm adds: parts [S, M, H] or rows [M, H], and a number by which they are multiplied."""
    multiplier = 1.0
    if is_scaled_product(x):
        multiplier, x = x.source.args[1], x.source.args[0]
    if is_whole_product(x):
        return x.source.parts(), multiplier
    return computed(x).reshape(-1, x.shape[-1]), multiplier


class Deferred(torch.Tensor):
    """A source or a view of it.  outline: like the source's; views: the operations that lead from the source here"""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source, outline=None, views=()):
        outline = source.outline if outline is None else outline
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            outline.shape,
            strides=outline.stride(),
            storage_offset=outline.storage_offset(),
            dtype=outline.dtype,
            device=source.device,
        )
        made.source, made.outline, made.views = source, outline, views
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Where no mode knows better."""
        with _disable_current_modes():
            return function(*computed(args), **computed(kwargs or {}))

    def value(self):
        """The tensor that this stands for."""
        whole, outline = self.source.value(), self.outline
        if outline is self.source.outline:
            return whole
        return whole.as_strided(outline.shape, outline.stride(), outline.storage_offset() + whole.storage_offset())


def computed(values):
    """A tree of values in which everything deferred is computed."""
    if isinstance(values, Deferred):
        return values.value()
    if torch.is_tensor(values):
        return values
    return tree_map_only(Deferred, Deferred.value, values)


def viewed(x, function, args=(), kwargs=None):
    """A view operation on x: deferred, or several; None where it would be a copy."""
    kwargs = kwargs or {}
    if function._schema.name == "aten::to" and function._overloadname != "dtype":
        return None
    found = function(x.outline, *args, **kwargs)
    several = [found] if torch.is_tensor(found) else found
    storage = x.outline.untyped_storage()._cdata
    if any(one.untyped_storage()._cdata != storage for one in several):
        return None
    views = [(*x.views, (function, args, kwargs, None if torch.is_tensor(found) else i)) for i in range(len(several))]
    made = [Deferred(x.source, one, views[i]) for i, one in enumerate(several)]
    return made[0] if torch.is_tensor(found) else made


def replayed(views, x):
    """The same views of another Deferred; None where one would be a copy."""
    for function, args, kwargs, place in views:
        x = viewed(x, function, args, kwargs)
        if x is None:
            return None
        x = x if place is None else x[place]
    return x


# --- what a Deferred is ---


def is_source(x, kind, name=None):
    """Whether x is deferred, of a source of this class (and name) that may be looked into."""
    if not isinstance(x, Deferred) or x.source.settled:
        return False
    return isinstance(x.source, kind) and (name is None or x.source.name == name)


def is_whole(x):
    """Whether a Deferred is all of its source, in order."""
    return (
        x.outline.numel() == x.source.outline.numel() and x.outline.is_contiguous() and x.source.outline.is_contiguous()
    )


def is_whole_product(x):
    return is_source(x, Product) and is_whole(x)


def is_scaled_product(x):
    """Whether x is all of a product times a number."""
    return (
        is_source(x, Call, "mul")
        and is_whole(x)
        and isinstance(x.source.args[1], int | float)
        and is_whole_product(x.source.args[0])
    )


def columns(x):
    """(first, number) of the columns of a product that x is, in all rows; None if it is something else."""
    if not is_source(x, Product) or x.outline.stride(-1) != 1:
        return None
    stride, width = x.source.w.shape[0], x.shape[-1]
    if x.outline.numel() != len(x.source.rows) * width:
        return None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.outline.stride()[:-1])):
        if size > 1 and step != stride:
            return None
        stride *= size
    first = x.outline.storage_offset()
    return (first, width) if first + width <= x.source.w.shape[0] else None
