"""Import Triton where it is installed, and decide which tensors it works on.

Kernels are written with `jit` and `tl` from here, so that a machine without Triton (a Mac, a bare CPU) can import every op and
run its reference. A GPU tensor never falls back: its wrapper calls `on_triton`, which raises if Triton is missing.

Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, and for a pointer that is a multiple of 16. Arguments
that vary from step to step (numbers of rows; indices, which may be slices) are named in `do_not_specialize` and in
`do_not_specialize_on_alignment`: nobody should wait for a compiler.
"""

import contextlib
import os

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    triton = None

    class tl:
        """Stands in for triton.language where kernels are only defined, never launched."""

        @staticmethod
        def constexpr(value):
            return value

    def jit(function=None, **_):
        return (lambda decorated: decorated) if function is None else function


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x):
    """True if ops on the tensor x run as Triton kernels: on a GPU, or anywhere under TRITON_INTERPRET=1.

    Raises RuntimeError if they should and Triton is not installed.
    """
    if not (x.is_cuda or INTERPRETED):
        return False
    if triton is None:
        raise RuntimeError(
            f"tensors on {x.device} run on Triton kernels, and triton is not installed: pip install triton"
        )
    return True


def on_device(device):
    """Make `device` the current device, which Triton and CUDA events look at."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
