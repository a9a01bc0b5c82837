"""A GPU that is not there: what the wrappers of kernels/ launch on it, recorded, and compiled if wanted.

    with AbsentGpu(GPUS["RTX 4090"]) as gpu:
        linear(torch.empty(1, 4096, dtype=torch.bfloat16, device="cuda"), torch.empty(6144, 4096, dtype=..., device="cuda"))
    gpu.launches[0].compile().metadata.shared      # bytes of shared memory per block

Inside, tensors on "cuda" have shapes and no contents, PyTorch and Triton are told the GPU's properties, and a launch is recorded
instead of made. Triton compiles for any NVIDIA GPU, with the ptxas of its own wheel. Nothing runs: no result, no time, no bit.
Not for TRITON_INTERPRET=1.
"""

import contextlib
import functools
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...kernels.linear import linear_handover
from ...kernels.linear.linear_prefill import num_multiprocessors
from ...kernels.overlap import has_tensor_maps
from ...kernels.shared_memory import shared_memory

CACHED = (has_tensor_maps, num_multiprocessors, shared_memory)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True)
class Gpu:
    """What the wrappers ask of a GPU."""

    name: str
    capability: tuple  # (major, minor)
    shared_memory: int  # bytes per block, at most
    multiprocessors: int

    @property
    def target(self):
        """The architecture as Triton names it, such as sm_89."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


# Shared memory per block: CUDA C++ programming guide, table of compute capabilities.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), 163 << 10, 108),
        Gpu("RTX 3090", (8, 6), 99 << 10, 82),
        Gpu("RTX 4090", (8, 9), 99 << 10, 128),
        Gpu("H200", (9, 0), 227 << 10, 132),
        Gpu("B200", (10, 0), 227 << 10, 148),
        Gpu("RTX 5090", (12, 0), 99 << 10, 170),
    )
}


@dataclass(frozen=True)
class Launch:
    """One compiled form of a kernel, as a wrapper asked for it."""

    kernel: object = field(repr=False)  # JITFunction
    signature: dict  # type of every argument
    constants: dict  # values of the compile-time arguments, by name
    attributes: dict = field(repr=False)  # alignment of arguments
    options: dict  # warps, stages, ...
    gpu: Gpu = field(repr=False)

    @property
    def name(self):
        """Name of the kernel's file and of the kernel."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def key(self):
        """Text that tells one launch of a GPU from another."""
        return f"{self.name} {self.signature} {self.constants} {self.attributes} {self.options}"

    def compile(self):
        """Triton's CompiledKernel; `metadata.shared` are the bytes of shared memory. Raises what the compiler raises."""
        constants = {(self.kernel.arg_names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.kernel, self.signature, constants, self.attributes)
        major, minor = self.gpu.capability
        return triton.compile(source, target=GPUTarget("cuda", major * 10 + minor, 32), options=self.options)


class AbsentGpu(TorchFunctionMode):
    """Within it the wrappers see this GPU; `launches` are those they made, in order."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.launches, self._stack = gpu, [], contextlib.ExitStack()

    def __enter__(self):
        gpu = self.gpu
        properties = SimpleNamespace(
            multi_processor_count=gpu.multiprocessors, shared_memory_per_block_optin=gpu.shared_memory, name=gpu.name
        )
        driver = SimpleNamespace(
            get_current_device=lambda: gpu.name,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32),
        )
        for function in CACHED:
            function.cache_clear()
        patch = functools.partial(mock.patch.object, create=True)
        for patched in (
            patch(torch.cuda, "get_device_properties", lambda device: properties),
            patch(torch.cuda, "get_device_capability", lambda device: gpu.capability),
            # The real ones stay, for graphs hold their address.
            patch(
                linear_handover, "handover_flags", lambda device: torch.empty(gpu.multiprocessors, device=device).int()
            ),
            patch(triton.runtime.driver, "_active", driver),
            patch(triton.knobs.runtime, "jit_cache_hook", self._record),
        ):
            self._stack.enter_context(patched)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()
        for function in CACHED:
            function.cache_clear()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.device:
            args, kwargs = tuple(map(_placed, args)), {name: _placed(value) for name, value in kwargs.items()}
        found = function(*args, **kwargs)
        if function == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        if function == torch.Tensor.device.__get__ and found.type == "meta":
            return torch.device("cuda", 0)
        return found

    def _record(self, fn, compile, **_):
        """Triton's hook before it compiles; True: it shall not."""
        kernel = fn.jit_function
        options = json.loads(compile["specialization_data"])["options"]
        self.launches.append(
            Launch(
                kernel,
                compile["signature"],
                {kernel.arg_names[path[0]]: value for path, value in compile["constants"].items()},
                compile["configs"][0],
                {name: options[name] for name in OPTIONS if name in options},
                self.gpu,
            )
        )
        return True


def _placed(value):
    """The device on which tensors without contents lie for "cuda"; any other value itself."""
    on_gpu = isinstance(value, torch.device | str) and str(value).partition(":")[0] == "cuda"
    return torch.device("meta") if on_gpu else value
