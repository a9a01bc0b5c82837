"""The places where a Triton kernel is tested: on a GPU, and in the interpreter (fp32 by value: its bf16 dots are wrong)."""

import pytest


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.interpreter)]
)
def kernel_device(request):
    """The device: cuda, or cpu under TRITON_INTERPRET=1. A test that takes it runs in both places."""
    return request.param


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
