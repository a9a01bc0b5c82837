"""experts: the formula by value, and a row's bits in any company, however the rows are routed."""

import pytest
import torch

from headstart.kernels.linear import experts as module
from headstart.kernels.linear.experts import SILU, experts, experts_reference, tile_of_pairs
from headstart.tests.kernels.linear.products import assert_captured, dtypes_of, error, poison


def mixture(rows, num_experts, top_k, width, inner, dtype, device="cpu", gate=True, seed=0):
    """x, index, weights, up, down, up_bias, down_bias; every expert index differs within a row, and expert 1 is chosen by none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    scores = normal(rows, num_experts)
    scores[:, 1] = -100
    weights, index = torch.topk(torch.softmax(scores, -1), top_k)
    up = normal(num_experts, inner * (2 if gate else 1), width) / width**0.5
    down = normal(num_experts, width, inner) / inner**0.5
    given = normal(rows, width), weights, up, down, normal(num_experts, up.shape[1]), normal(num_experts, width)
    x, weights, up, down, up_bias, down_bias = (one.to(device, dtype) for one in given)
    return x, index.to(device), weights, up, down, up_bias, down_bias


def squared(hidden):
    return torch.relu(hidden) ** 2


def results(found):
    """{name: experts(...)} with and without gate and biases, for (x, index, weights) of `found`."""
    x, index, weights, up, down, up_bias, down_bias = found
    width = down.shape[2]
    return {
        "gate": experts(x, index, weights, up, down),
        "biases": experts(x, index, weights, up, down, SILU, up_bias, down_bias),
        "no gate": experts(x, index, weights, up[:, :width].contiguous(), down, squared),
        "own gate": experts(x, index, weights, up, down, lambda hidden: hidden[:, ::2] * torch.relu(hidden[:, 1::2])),
    }


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 4, 2), (19, 5, 1), (40, 6, 3)])
def test_values_are_those_of_the_formula(device, rows, num_experts, top_k):
    for dtype in dtypes_of(device):
        found = mixture(rows, num_experts, top_k, 72, 40, dtype, device)
        x, index, weights, up, down, up_bias, down_bias = found
        poison(device)
        got = results(found)
        wide = [one.double() for one in (x, weights, up, down, up_bias, down_bias)]
        x, weights, up, down, up_bias, down_bias = wide
        half = down.shape[2]
        exact = {
            "gate": experts_reference(x, index, weights, up, down),
            "biases": experts_reference(x, index, weights, up, down, SILU, up_bias, down_bias),
            "no gate": experts_reference(x, index, weights, up[:, :half], down, squared),
            "own gate": experts_reference(
                x, index, weights, up, down, lambda hidden: hidden[:, ::2] * torch.relu(hidden[:, 1::2])
            ),
        }
        for name, one in got.items():
            assert one.dtype == dtype
            assert error(one, exact[name]) <= {torch.float32: 1e-6, torch.float16: 2e-3}.get(dtype, 1e-2), name


def test_a_row_has_the_same_bits_in_any_company(device):
    rows = 130 if device == "cuda" else 60
    found = mixture(rows, 6, 3, 72, 40, torch.float32, device)
    whole = results(found)
    for start, count in ((0, 1), (rows - 1, 1), (17, 7), (rows - 50, 44)):
        some = [one[start : start + count].clone() for one in found[:3]]
        for name, one in results([*some, *found[3:]]).items():
            assert torch.equal(one, whole[name][start : start + count]), (name, start)


def test_company_may_choose_one_expert_or_all_others(device):
    x, index, weights, *rest = mixture(90, 6, 2, 72, 40, torch.float32, device)
    first = experts(x, index, weights, *rest[:2])[0]
    for crowd in (index[0], torch.tensor([4, 5], device=index.device)):
        other = torch.cat((index[:1], crowd.repeat(89, 1)))
        assert torch.equal(experts(x, other, weights, *rest[:2])[0], first)


def test_the_routers_order_is_the_order_of_the_sum():
    """In another order the bits are others, so a change of the order would be seen above."""
    x, index, weights, up, down, *_ = mixture(40, 6, 3, 72, 40, torch.float32)
    turned = experts(x, index.flip(1), weights.flip(1), up, down)
    assert not torch.equal(turned, experts(x, index, weights, up, down))
    torch.testing.assert_close(turned, experts(x, index, weights, up, down))


def on_two_devices(found, act, splits):
    """The mixture whose features two devices divide: each sees what both have computed of the hidden features."""
    x, index, weights, up, down, up_bias, down_bias = found
    gates, halves = (2 if act == SILU else 1), []
    for rank in range(2):
        own_up, own_bias = (one.unflatten(1, (gates, 2, -1))[:, :, rank].flatten(1, 2) for one in (up, up_bias))
        own_down, last = (one.chunk(2, 1)[rank].contiguous() for one in (down, down_bias))
        halves.append((own_up.contiguous(), own_down, act, own_bias.contiguous(), last))
    parts = ([], [])

    def first(rank):
        def joined(part):
            parts[rank].append(part)
            return part.repeat(1, 2)

        return joined

    for rank, half in enumerate(halves):
        experts(x, index, weights, *half, joined=first(rank), splits=splits)
    whole = [iter([torch.cat(pair, 1) for pair in zip(*parts)]) for _ in halves]
    results = [
        experts(x, index, weights, *half, joined=lambda _, all_=all_: next(all_), splits=splits)
        for half, all_ in zip(halves, whole)
    ]
    return torch.cat(results, 1)


@pytest.mark.parametrize("gate", [True, False])
def test_features_on_two_devices_are_the_bits_of_one(device, gate, monkeypatch):
    """Where the ranges of K are those of the whole weight, which has more features."""
    monkeypatch.setattr(module, "num_splits", lambda n, k: 2 if n == 96 else 1)
    act = SILU if gate else squared
    for dtype in dtypes_of(device):
        found = mixture(19, 5, 2, 96, 256, dtype, device, gate)
        expected = experts(*found[:5], act, *found[5:])
        assert torch.equal(on_two_devices(found, act, 2), expected)


@pytest.mark.interpreter
def test_tensor_maps_and_ranges_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(module, "num_splits", lambda n, k: 2)
    found = mixture(21, 4, 2, 136, 264, torch.float16)
    exact = experts_reference(found[0].double(), found[1], *(one.double() for one in found[2:5]))
    assert error(experts(*found[:5]), exact) <= 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "inner", "num_experts", "top_k"), [(4096, 14336, 8, 2), (2048, 768, 128, 8)], ids=["mixtral", "qwen3"]
)
def test_a_row_has_the_same_bits_among_thousands_at_real_widths(width, inner, num_experts, top_k):
    found = mixture(4096, num_experts, top_k, width, inner, torch.bfloat16, seed=1)
    found = [one.cuda() for one in found]
    x, index, weights, up, down, *_ = found
    whole = experts(x, index, weights, up, down)
    for start, count in ((0, 1), (4095, 1), (5, 16), (17, 64), (100, 300), (1, 2048)):
        rows = [one[start : start + count].clone() for one in (x, index, weights)]
        assert torch.equal(experts(*rows, up, down), whole[start : start + count]), count
    rows = slice(0, 64)
    exact = experts_reference(x[rows].double(), index[rows], weights[rows].double(), up.double(), down.double())
    library = experts_reference(x[rows], index[rows], weights[rows], up, down)
    assert error(whole[rows], exact) <= 2 * error(library, exact)


@pytest.mark.gpu
def test_a_captured_mixture_follows_its_routes():
    x, index, weights, up, down, *_ = mixture(64, 8, 2, 512, 1024, torch.bfloat16, "cuda")
    assert_captured(lambda: experts(x, index, weights, up, down))
    given = index.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = experts(x, given, weights, up, down)
    for routes in (index, index.flip(0), torch.tensor([[6, 7]], device="cuda").repeat(64, 1)):
        given.copy_(routes)
        graph.replay()
        assert torch.equal(found, experts(x, routes, weights, up, down))


def test_tiles_hold_twice_the_mean_share():
    assert [tile_of_pairs(rows, 2 * rows, 8) for rows in (1, 16, 64, 256, 4096)] == [16, 16, 32, 128, 128]
    assert tile_of_pairs(4096, 8 * 4096, 128, itemsize=4) == 64


def test_shapes_that_do_not_fit_are_refused():
    x, index, weights, up, down, _, down_bias = mixture(3, 4, 2, 16, 8, torch.float32)
    for given in (
        (x[0], index, weights, up, down),
        (x, index[:2], weights[:2], up, down),
        (x, index, weights, up[:, :8], down),
        (x, index, weights, up, down, SILU, down_bias[:, :8]),
    ):
        with pytest.raises(ValueError, match="experts takes x"):
            experts(*given)
    assert experts(x[:0], index[:0], weights[:0], up, down).shape == (0, 16)
