"""Operations that become one kernel: the bits of the operations one by one, whatever lies between them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headstart.inference.models.modules.deferred import Call, Deferred, Product, Sum, computed, is_source
from headstart.inference.models.modules.packed_heads import heads_of, packed_heads
from headstart.inference.models.modules.product_groups import groups_of, pack_products
from headstart.inference.models.modules.row_ops import RowOps, UnsupportedOperation
from headstart.kernels.linear.gated_mlp import gate_up_silu
from headstart.kernels.linear.linear import linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# On a GPU the products of the wide one have two ranges of K.
WIDTHS = [48, pytest.param(4096, marks=pytest.mark.gpu)]


def rows(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def dtypes(device):
    return [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("order", ["product last", "product first", "scaled", "no product"])
def test_an_addition_and_its_norm_are_the_same_bits_in_one(norm, order, width, device):
    if width > 100 and device == "cpu":
        pytest.skip("one range of K on the CPU")
    for dtype in dtypes(device):
        how = dict(dtype=dtype, device=device)
        x, residual, w = rows(1, 9, 80, **how), rows(1, 9, width, seed=1, **how), rows(width, 80, seed=2, **how)
        scale, shift = rows(width, seed=3, **how), rows(width, seed=4, **how)

        def normed(total, scale=scale, shift=shift):
            if norm == "rms_norm":
                return F.rms_norm(total, total.shape[-1:], scale, 1e-5)
            return F.layer_norm(total, total.shape[-1:], scale, shift, 1e-5)

        def added(product, residual=residual):
            if order == "product first":
                return product + residual
            return residual + (product * 0.22 if order == "scaled" else product)

        def product(x=x, w=w):
            found = F.linear(x, w)
            return computed(found) if order == "no product" else found

        with torch.inference_mode(), RowOps() as ops:
            total = added(product())
            assert is_source(total, Sum)
            found = normed(total.view(9, width))  # a view of all of it
            again = computed(total)
            expected_total = computed(added(computed(product())))
            expected = computed(normed(expected_total)).view(9, width)
        assert torch.equal(computed(found), expected)
        assert torch.equal(again, expected_total)
        assert ops.fused["add + norm"] == (0 if (norm, order) == ("layer_norm", "scaled") else 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gated_mlp_of_one_product_is_one_kernel(device):
    for dtype in dtypes(device):
        how = dict(dtype=dtype, device=device)
        x, w, b = rows(1, 9, 48, **how), rows(160, 48, seed=1, **how), rows(160, seed=2, **how)
        with torch.inference_mode(), RowOps() as ops:
            gate, up = F.linear(x, w, b).chunk(2, -1)
            found, swapped = F.silu(gate) * up, up * F.silu(gate)
            other = F.silu(up) * gate  # the kernel has the gate first
        assert not isinstance(found, Deferred)
        expected = gate_up_silu(x[0], w, b)
        assert torch.equal(found[0], expected)
        assert torch.equal(swapped[0], expected)
        assert ops.fused["gated"] == 2
        gate, up = (half.float() for half in linear(x[0], w, b).chunk(2, -1))
        near = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(computed(other)[0].float(), F.silu(up) * gate, **near)


def test_what_is_written_to_does_not_change_what_was_read_before():
    x, w, residual = rows(5, 48), rows(48, 48, seed=1), rows(5, 48, seed=2)
    expected = residual + linear(x, w)
    with torch.inference_mode(), RowOps():
        x, residual = x.clone(), residual.clone()
        product = F.linear(x, w)
        total = residual + product
        x.mul_(2)
        residual.fill_(0)
        product.fill_(0)
        view = F.linear(x, w).view(5, 6, 8)
        view.fill_(0)
    assert torch.equal(computed(total), expected)
    assert computed(product).eq(0).all()
    assert computed(view).eq(0).all()


def double(x):
    return x.mul_(2)


def mask(x):
    return x.masked_fill_(x > 0.3, 0.0)


def write_up(x, w, residual, write):
    gate, up = F.linear(x, w).chunk(2, -1)
    write(up)
    return F.silu(gate) * up


def write_up_late(x, w, residual, write):
    gate, up = F.linear(x, w).chunk(2, -1)
    gate = F.silu(gate)
    write(up)
    return gate * up


def write_rows(x, w, residual, write):
    gate, up = F.linear(x, w).chunk(2, -1)
    write(x)
    return F.silu(gate) * up


def write_product(x, w, residual, write):
    product = F.linear(x, w)
    scaled = product * 0.5
    write(product)
    total = residual + scaled
    return F.rms_norm(total, total.shape[-1:], torch.ones_like(w[:, 0]), 1e-5)


def write_sum(x, w, residual, write):
    total = residual + F.linear(x, w)
    write(total)
    return F.rms_norm(total, total.shape[-1:], torch.ones_like(w[:, 0]), 1e-5)


def write_negative(x, w, residual, write):
    x1, x2 = F.linear(x, w).chunk(2, -1)
    x2 = -x2
    write(x1)
    return torch.cat((x2, x1), -1)


@pytest.mark.parametrize("write", [double, mask])
@pytest.mark.parametrize(
    "case",
    [write_up, write_up_late, write_rows, write_product, write_sum, write_negative],
    ids=lambda case: case.__name__,
)
def test_what_is_made_after_a_write_has_what_was_written(case, write):
    x, w, residual = rows(1, 5, 48), rows(96, 48, seed=1), rows(1, 5, 96, seed=2)
    with torch.inference_mode():
        with RowOps() as ops:
            found = computed(case(x.clone(), w, residual.clone(), write))
        expected = case(x.clone(), w, residual.clone(), write)
        with RowOps() as seen:  # as a trial sees it
            case(*(given.to("meta") for given in (x, w, residual)), write)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ops.fused == seen.fused


def test_heads_that_were_written_to_go_to_attention_as_they_are():
    x, w = rows(1, 5, 48), rows(96, 48, seed=1)
    with torch.inference_mode(), RowOps():
        heads = F.linear(x, w).view(1, 5, 12, 8).transpose(1, 2)
        scaled = heads * 0.5
        assert heads_of(scaled).multiplier == 0.5
        heads.add_(1)
        assert heads_of(scaled) is heads_of(heads) is None
        assert heads_of(F.linear(x, w).view(1, 5, 12, 8).transpose(1, 2)) is not None, "another product"
    torch.testing.assert_close(computed(scaled), (computed(heads) - 1) * 0.5)


def rotated(x, cos, sin):
    """As transformers' modules do it."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("transposed_first", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7])
def test_heads_are_rotated_in_one_kernel_whatever_the_number_of_rows(num_rows, transposed_first, normed):
    """6 query heads and 2 key heads: as many rows as heads are no exception."""
    x, w, cos, sin = rows(1, num_rows, 48), rows(80, 48, seed=1), rows(num_rows, 8, seed=2), rows(num_rows, 8, seed=3)
    scale = torch.ones(8)
    table = (1, 1, num_rows, 8) if transposed_first else (1, num_rows, 1, 8)
    of_rows = cos.view(table), sin.view(table)

    def heads(part, num, tables=of_rows):
        part = part.reshape(1, num_rows, num, 8)
        part = F.rms_norm(part, (8,), scale, 1e-5) if normed else part
        if transposed_first:
            return rotated(part.transpose(1, 2), *tables)
        return rotated(part, *tables).transpose(1, 2)

    with torch.inference_mode(), RowOps() as ops:
        q, k, v = F.linear(x, w).split((48, 16, 16), -1)
        value = v.view(1, num_rows, 2, 8).transpose(1, 2)
        found = packed_heads(ops, heads(q, 6), heads(k, 2), value)
        if num_rows == 6:  # angles of heads are no angles of rows
            of_heads = cos.view(1, 6, 1, 8) if transposed_first else cos.view(1, 1, 6, 8)
            assert heads_of(heads(q, 6, (of_heads, of_heads))) is None
    assert torch.equal(found.q.angles[0], cos)
    assert torch.equal(found.k.angles[1], sin)


@pytest.mark.parametrize("function", [torch.mul, torch.add, torch.sub])
def test_operations_that_write_where_they_are_told_are_refused_by_name(function):
    x, w = rows(5, 48), rows(48, 48, seed=1)
    z = torch.empty(5, 48)
    with torch.inference_mode(), RowOps(), pytest.raises(UnsupportedOperation, match=f"{function.__name__} with out="):
        function(F.linear(x, w), x, out=z)


def test_partial_sums_are_not_kept_beside_the_result():
    x, w = rows(5, 48), rows(48, 48, seed=1)
    with torch.inference_mode(), RowOps():
        product = F.linear(x, w).source
    parts, value = product.parts(), product.value()
    assert product._parts is None
    assert torch.equal(product.parts()[0], parts.sum(0))
    assert product.parts().data_ptr() == value.data_ptr()


class Attention(nn.Module):
    def __init__(self, biased=True):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(48, 40, biased), nn.Linear(48, 16, biased), nn.Linear(48, 16, biased)
        self.other = nn.Linear(48, 8, not biased)

    def forward(self, x):
        return [part(x) for part in (self.q, self.k, self.v, self.other)]


def grouped(module, names):
    return pack_products(module, [names])


def test_linears_of_the_same_rows_are_one_product_and_their_weights_lie_in_it():
    module, x, y = Attention().requires_grad_(False), rows(7, 48), rows(7, 48, seed=5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    expected = linear(x, torch.cat((module.q.weight, module.k.weight, module.v.weight)),
                      torch.cat((module.q.bias, module.k.bias, module.v.bias)))  # fmt: skip
    packed = grouped(module, ["q", "k", "v"])
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    with torch.inference_mode(), RowOps(packed) as ops:
        q, k, v, other = module(x)
        assert q.source is k.source is v.source
        assert other.source is not q.source
        assert [len(part.views) for part in (q, k, v)] == [1, 1, 1]
        others = module(y)  # the same weights and other rows
        again = module.q(x)
    assert torch.equal(torch.cat(computed((q, k, v)), -1), expected)
    assert torch.equal(computed(other), linear(x, module.other.weight))
    assert ops.fused["product"] == 3
    assert not torch.equal(computed(others[0]), computed(q))
    assert torch.equal(computed(again), computed(q))
    found = grouped(module, ["q", "k", "v"])  # of another decoder
    assert all(found[name].w.data_ptr() == packed[name].w.data_ptr() for name in packed), "nothing moved"
    bias = module.v.bias
    for other in (nn.Parameter(bias.clone(), False), nn.Parameter(bias + 5, False), None):
        module.v.bias = other
        with torch.inference_mode(), RowOps(packed) as ops:
            found = module.v(x)
        assert torch.equal(computed(found), linear(x, module.v.weight, other))
        assert ops.fused["product"] == 0
    module.v.bias = bias
    module.k.weight.data = module.k.weight.data.clone()  # it has left
    with torch.inference_mode(), RowOps(packed) as ops:
        assert is_source(module.k(x), Product)
        assert ops.fused["product"] == 0
        module.v(x)
        assert ops.fused["product"] == 1


def test_only_like_linears_of_one_module_that_read_the_same_are_grouped():
    module = Attention()
    module.tied = nn.Linear(48, 16)
    module.tied.weight = module.v.weight
    x, y = object(), object()
    weights = {name: getattr(module, name).weight for name in ("q", "k", "other")}
    calls = [(x, weights["q"]), (x, weights["k"]), (x, weights["other"]), (x, module.v.weight)]
    assert groups_of(module, calls, []) == [["q", "k"]]
    assert groups_of(module, [*calls, (y, weights["k"])], []) == []  # k is called twice
    assert groups_of(module, [(x, weights["q"]), (y, weights["k"])], []) == []
    assert groups_of(module, calls, [[weights["k"], weights["q"]]]) == [["k", "q"]]


def test_deferred_values_are_what_the_library_makes_of_them():
    """Of patterns that come close to what is known, and end otherwise."""
    x, w, more, column = rows(1, 5, 48), rows(96, 48, seed=1), rows(1, 5, 96, seed=4), rows(7, seed=4)
    cos, sin = rows(1, 1, 5, 8, seed=2), rows(1, 1, 5, 8, seed=3)

    def heads(y):
        return y.view(1, 5, 12, 8).transpose(1, 2)

    def rotated(y):
        return heads(y) * cos + torch.cat((-heads(y)[..., 4:], heads(y)[..., :4]), -1) * sin

    cases = {
        "rotated": rotated,
        "other halves": lambda y: heads(y) * cos + torch.cat((-heads(y)[..., :4], heads(y)[..., 4:]), -1) * sin,
        "quarters": lambda y: torch.cat((-heads(y)[..., 4:6], heads(y)[..., :2]), -1),
        "rows turned round": lambda y: rotated(y).transpose(1, 2).reshape(5, 96),
        "normed": lambda y: F.rms_norm(y.view(1, 5, 12, 8), (8,), cos[0, 0, 0], 1e-5).transpose(1, 2) * 0.3,
        "silu of a part": lambda y: F.silu(y[..., :40]) * y[..., 40:80],
        "silu twice": lambda y: F.silu(F.silu(y)) * y,
        "product of two": lambda y: y * y,
        "negative": lambda y: (-y).neg(),
        "sum of sums": lambda y: ((y + y) + y) + more,
        "broadcast": lambda y: y + more[0, 0],
        "wider": lambda y: y[..., None] * column,
        "with a column": lambda y: torch.cat((y, y[..., :3]), -1),
    }
    for name, case in cases.items():
        with torch.inference_mode():
            with RowOps():
                found = case(F.linear(x, w))
            expected = case(F.linear(x, w))
        torch.testing.assert_close(computed(found), expected, rtol=1e-4, atol=1e-4, msg=name)
        assert found.stride() == computed(found).stride(), name
    with torch.inference_mode(), RowOps():
        assert is_source(rotated(F.linear(x, w)), Call, "rotated")


def test_what_waits_is_computed_in_its_order(monkeypatch):
    """On several ranks each product is gathered, so all must compute them in one order."""
    order, compute = [], Product.compute

    def recorded(product):
        order.append(product)
        return compute(product)

    monkeypatch.setattr(Product, "compute", recorded)
    given, w = [rows(2, 16, seed=i) for i in range(40)], rows(16, 16)
    with torch.inference_mode(), RowOps():
        waiting = [F.linear(x, w) for x in given]
        torch.zeros(3).fill_(1)
    assert order == [one.source for one in waiting]
