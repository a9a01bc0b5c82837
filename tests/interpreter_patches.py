"""Triton's interpreter does less of its own work: three quarters of its time went into objects that describe tensors.

Patches of triton.language are made once for a process instead of at every launch and call. Types and shapes are looked up instead
of made and checked anew at every operation. Sums and products of small integers are not computed once more in 64 bits: the
library compares them with the bounds and then, unless it debugs, drops what it found. Values are computed as before.
"""

import builtins
import inspect
import math

import triton.language as tl
from triton.language.core import _unwrap_if_constexpr as _unwrap
from triton.runtime import interpreter

_library_block_type = tl.block_type.__init__
_library_np_dtype = interpreter._get_np_dtype
PLAIN = {int, float, bool, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor}


class _Kept:
    """In place of what would take the patches back at the end of a launch."""

    @staticmethod
    def restore():
        pass


def _patch_once():
    patch_language, patched, known = interpreter._patch_lang, set(), {}

    def patch_unless_patched(function):
        names = function.__globals__
        if id(names) in known:
            return _Kept
        known[id(names)] = names  # which keeps it, and with it its number
        seen = frozenset(id(one) for one in names.values() if inspect.ismodule(one) and one in (tl, tl.core))
        if seen not in patched:
            patched.add(seen)
            patch_language(function)
        return _Kept

    interpreter._patch_lang = patch_unless_patched


def _look_types_up():
    blocks, dtypes = {}, {}

    def block_type(self, element_ty, shape):
        """vars(self) of the first one of this element type and shape."""
        lengths = builtins.tuple(_unwrap(one) for one in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), lengths, *map(type, (shape, *lengths))
        if key not in blocks:
            _library_block_type(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def unwrap(value):
        return value if value.__class__ in PLAIN else _unwrap(value)

    def np_dtype(dtype):
        element = dtype.scalar
        if element.name not in dtypes:
            dtypes[element.name] = _library_np_dtype(element)
        return dtypes[element.name]

    tl.block_type.__init__ = block_type
    tl.core._unwrap_if_constexpr = unwrap
    interpreter._get_np_dtype = np_dtype


def _make_shapes_once():
    shapes = {}

    def tensor(self, handle, type):
        lengths = type.shape if type.is_block() else ()
        if lengths not in shapes:
            shapes[lengths] = tl.constexpr(math.prod(lengths)), tl.tuple([tl.constexpr(length) for length in lengths])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[lengths]

    tl.tensor.__init__ = tensor


def install():
    """For the whole process: nothing else may use triton.language in it."""
    _patch_once()
    _look_types_up()
    _make_shapes_once()
    if not interpreter.interpreter_builder.options.debug:
        type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = lambda *given: None
