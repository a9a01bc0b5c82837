"""The places where a Triton kernel is tested: on a GPU, and in the interpreter (fp32 by value: its bf16 dots are wrong)."""

import os

import pytest


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.interpreter)]
)
def kernel_device(request):
    """The device: cuda, or cpu under TRITON_INTERPRET=1. A test that takes it runs in both places."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def patch_once_per_launch():
    """The interpreter patches triton.language anew whenever a kernel calls a function, which is a third of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    launch, patch_language, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_unpatched(executor, *args, **kwargs):
        patched.clear()  # a launch takes its patches back at its end
        return launch(executor, *args, **kwargs)

    def patch_unless_patched(function):
        if function not in patched:
            patched.add(function)
            return patch_language(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)
        patch.setattr(interpreter, "_patch_lang", patch_unless_patched)
        yield


@pytest.fixture(
    params=[
        "reference",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.interpreter),
    ]
)
def device(request):
    """Where a test runs: the reference on the CPU, the kernel on a GPU, the kernel in the interpreter."""
    return "cpu" if request.param == "reference" else request.param
