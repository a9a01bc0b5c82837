"""What the tests of the products share: operands, an error, memory that shows what nobody wrote."""

import torch

GPU_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(rows, n, k, dtype=torch.float32, device="cpu", seed=0):
    """x [rows, k], w [n, k] of rows with norm about 1, b [n], the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    w = torch.randn(n, k, generator=generator) / k**0.5
    b = torch.randn(n, generator=generator)
    return tuple(t.to(device, dtype) for t in (x, w, b))


def dtypes_of(device):
    """The interpreter computes bfloat16 products wrongly; float32 shows masks and addresses."""
    return GPU_DTYPES if device == "cuda" else [torch.float32]


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def poison(device):
    """Fills freed memory of the usual sizes with NaN, so that an output that nobody wrote shows."""
    if device == "cuda":
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            torch.full((size,), float("nan"), device=device)


def assert_captured(op):
    """op() in a CUDA graph gives what it gives outside."""
    expected = op()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op()
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, expected)
