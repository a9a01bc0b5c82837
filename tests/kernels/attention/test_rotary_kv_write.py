"""From the packed product to rotated queries and the cache, against a computation with complex numbers."""

import pytest
import torch

from headstart.kernels.attention.rotary_kv_write import heads_of_program, rotary_kv_write, rotary_kv_write_reference
from headstart.kernels.attention.tree_attention import PAGE


def make(device, dtype, heads, kv_heads, dim, rows=11, splits=1, seed=0, pages=3):
    generator = torch.Generator().manual_seed(seed)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(splits, rows, width, generator=generator).to(torch.float32 if splits > 1 else dtype)
    angle = torch.rand(300, dim // 2, generator=generator) * 6
    positions = torch.randint(300, (rows,), generator=generator)
    seats = torch.randperm(pages * PAGE, generator=generator)[:rows] + PAGE
    norms = [torch.rand(dim, generator=generator).to(dtype) for _ in range(2)]
    made = (
        qkv,
        positions,
        angle.cos(),
        angle.sin(),
        seats,
        torch.zeros(2, (pages + 1) * kv_heads * PAGE, dim, dtype=dtype),
    )
    return [x.to(device) for x in made], [x.to(device) for x in norms]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (6, 3, 20), (5, 1, 16), (0, 3, 20)])
def test_queries_keys_and_values_land_where_they_belong(kernel_device, heads, kv_heads, dim, normed):
    for splits in (1, 2):
        (qkv, positions, cos, sin, seats, kv), norms = make(
            kernel_device, torch.float32, heads, kv_heads, dim, splits=splits
        )
        extra = (*norms, 1e-6) if normed else ()
        found = rotary_kv_write(qkv, positions, cos, sin, seats, kv, heads, kv_heads, *extra)
        x = qkv.double().sum(0).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = x.split((heads, kv_heads, kv_heads), 1)
        if normed:
            q, k = (
                y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double() for y, norm in zip((q, k), norms)
            )
        turn = torch.complex(cos.double(), sin.double())[positions][:, None]
        q, k = (torch.complex(*y.contiguous().chunk(2, -1)) * turn for y in (q, k))
        q, k = (torch.cat((y.real, y.imag), -1) for y in (q, k))
        torch.testing.assert_close(found.double(), q, rtol=1e-5, atol=1e-5)
        pages = kv.view(2, 4, kv_heads, PAGE, dim)
        for row, seat in enumerate(seats.tolist()):
            torch.testing.assert_close(pages[0, seat // PAGE, :, seat % PAGE].double(), k[row], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(pages[1, seat // PAGE, :, seat % PAGE].double(), v[row], rtol=1e-5, atol=1e-5)
        written = torch.zeros(4 * PAGE, dtype=torch.bool, device=kernel_device).index_fill(0, seats, True).view(4, PAGE)
        assert pages.transpose(2, 3)[:, ~written].eq(0).all()


def test_rotation_gives_the_bits_of_the_formula(kernel_device):
    """No multiply-add is contracted, so the kernel agrees with the reference bit for bit (without a norm, which sums)."""
    for dtype in [torch.float32] + [torch.bfloat16] * (kernel_device == "cuda"):
        for splits in (1, 3):
            arguments, _ = make(kernel_device, dtype, 8, 2, 32, splits=splits)
            expected_kv = arguments[5].cpu()
            expected = rotary_kv_write_reference(*[x.cpu() for x in arguments[:5]], expected_kv, 8, 2)
            found = rotary_kv_write(*arguments, 8, 2)
            assert torch.equal(found.cpu(), expected)
            assert torch.equal(arguments[5].cpu(), expected_kv)


@pytest.mark.parametrize("rows", [130, 520])
def test_many_rows_give_the_bits_of_the_formula(kernel_device, rows):
    """A program takes more heads of them than of few, here more than there are of keys and not a whole part of the queries'."""
    dtype = torch.float32 if kernel_device == "cpu" else torch.bfloat16
    assert heads_of_program(rows, False) != heads_of_program(11, False) == heads_of_program(rows, True)
    arguments, _ = make(kernel_device, dtype, 20, 3, 16, rows=rows, pages=9)
    expected_kv = arguments[5].cpu()
    expected = rotary_kv_write_reference(*[x.cpu() for x in arguments[:5]], expected_kv, 20, 3)
    assert torch.equal(rotary_kv_write(*arguments, 20, 3).cpu(), expected)
    assert torch.equal(arguments[5].cpu(), expected_kv)


@pytest.mark.parametrize("normed", [False, True])
def test_each_row_may_bring_its_own_factors_for_both_halves_of_a_head(kernel_device, normed):
    """As modules have them: x * cos + rotate_half(x) * sin."""
    for dtype in [torch.float32] + [torch.bfloat16] * (kernel_device == "cuda"):
        arguments, norms = make(kernel_device, dtype, 6, 2, 32, splits=2)
        qkv, positions, cos, sin, places, kv = arguments
        extra = (6, 2, *norms, 1e-6) if normed else (6, 2)
        expected, expected_kv = rotary_kv_write(*arguments, *extra), kv.clone()
        both = [torch.cat((table, table), 1)[positions] for table in (cos, sin)]
        for given in (both, [table[:, :16] for table in both]):
            found = rotary_kv_write(qkv, None, *given, places, kv.zero_(), *extra)
            assert torch.equal(found, expected)
            assert torch.equal(kv, expected_kv)
        both = [torch.rand(11, 32, generator=torch.Generator().manual_seed(i)).to(kernel_device, dtype) for i in (1, 2)]
        found = rotary_kv_write(qkv, None, *both, places, kv, 6, 2)
        x = qkv.sum(0).to(dtype).view(11, 10, 32)[:, :6].double()
        turned = torch.cat((-x[..., 16:], x[..., :16]), -1)
        cos, sin = (table.double()[:, None] for table in both)
        near = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.double(), x * cos + turned * sin, **near)


def test_without_factors_nothing_turns_and_queries_may_be_scaled(kernel_device):
    for dtype in [torch.float32] + [torch.bfloat16] * (kernel_device == "cuda"):
        for splits in (1, 3):
            (qkv, _, _, _, places, kv), _ = make(kernel_device, dtype, 5, 1, 20, splits=splits)
            found = rotary_kv_write(qkv, None, None, None, places, kv, 5, 1, q_multiplier=0.3)
            total = qkv[0]
            for part in qkv[1:]:
                total = total + part
            q, k, v = total.to(dtype).view(-1, 7, 20).split((5, 1, 1), 1)
            assert torch.equal(found, q * 0.3)
            pages = kv.view(2, 4, 1, PAGE, 20)
            for row, seat in enumerate(places.tolist()):
                assert torch.equal(pages[0, seat // PAGE, :, seat % PAGE], k[row])
                assert torch.equal(pages[1, seat // PAGE, :, seat % PAGE], v[row])
            assert torch.equal(rotary_kv_write(qkv, None, None, None, places, kv, 5, 1), q)


def test_indices_may_have_32_bits(kernel_device):
    arguments, _ = make(kernel_device, torch.float32, 4, 2, 16)
    expected = rotary_kv_write(*arguments, 4, 2)
    arguments[1], arguments[4] = arguments[1].int(), arguments[4].int()
    assert torch.equal(rotary_kv_write(*arguments, 4, 2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_a_rows_bits_depend_on_neither_company_nor_parts(dim, dtype):
    (qkv, positions, cos, sin, seats, kv), norms = make("cuda", dtype, 8, 2, dim, rows=150, splits=2)
    extra = (8, 2, *norms, 1e-6)
    whole = rotary_kv_write(qkv, positions, cos, sin, seats, kv, *extra)
    summed, again = (qkv[0] + qkv[1]).to(dtype)[None], torch.zeros_like(kv)
    assert torch.equal(rotary_kv_write(summed, positions, cos, sin, seats, again, *extra), whole)
    assert torch.equal(kv, again)
    for rows in [*range(1, 65), 149]:
        for start in (0, 150 - rows):
            some, again = slice(start, start + rows), torch.zeros_like(kv)
            few = qkv[:, some].contiguous(), positions[some], cos, sin, seats[some], again
            assert torch.equal(rotary_kv_write(*few, *extra), whole[some])
            at = again != 0
            assert torch.equal(again[at], kv[at])


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True])
def test_a_rows_bits_do_not_depend_on_company_with_factors_of_its_own_or_none(rotated):
    (qkv, positions, cos, sin, places, kv), norms = make("cuda", torch.bfloat16, 8, 2, 128, rows=150, splits=2)
    both = [torch.cat((table, table), 1)[positions].bfloat16() if rotated else None for table in (cos, sin)]
    extra = (8, 2, *norms, 1e-6, None, 128**-0.5)
    whole = rotary_kv_write(qkv, None, *both, places, kv, *extra)
    for rows in [*range(1, 65), 149]:
        for start in (0, 150 - rows):
            some, again = slice(start, start + rows), torch.zeros_like(kv)
            own = [None if table is None else table[some] for table in both]
            assert torch.equal(
                rotary_kv_write(qkv[:, some].contiguous(), None, *own, places[some], again, *extra), whole[some]
            )
            at = again != 0
            assert torch.equal(again[at], kv[at])


def test_shapes_that_do_not_fit_are_refused():
    arguments, _ = make("cpu", torch.float32, 4, 2, 16)
    with pytest.raises(ValueError, match="rotary_kv_write takes qkv"):
        rotary_kv_write(*arguments, 5, 2)
    with pytest.raises(ValueError, match="q_norm must be"):
        rotary_kv_write(*arguments, 4, 2, torch.ones(8))
    with pytest.raises(ValueError, match=r"cos and sin \[P, 8\] or \[P, 16\]"):
        rotary_kv_write(*arguments[:2], arguments[2][:, :3], arguments[3][:, :3], *arguments[4:], 4, 2)
    with pytest.raises(ValueError, match="11 rows of cos"):
        rotary_kv_write(arguments[0], None, arguments[2][:3], arguments[3][:3], *arguments[4:], 4, 2)
    arguments[1] = arguments[1][:-1]
    with pytest.raises(ValueError, match="positions and cache rows"):
        rotary_kv_write(*arguments, 4, 2)


def test_values_land_in_a_cache_of_more_than_2_to_the_31_elements(kernel_device):
    """Those of an EAGLE head that serves a small target on a large GPU. On a CPU only what is written takes memory."""
    (qkv, positions, cos, sin, places, small), _ = make(kernel_device, torch.float16, 2, 1, 128, rows=3)
    try:
        kv = torch.empty(2, 2**24 + PAGE, 128, dtype=torch.float16, device=kernel_device)
    except RuntimeError:
        pytest.skip("9 GB cannot be allocated")
    far = torch.tensor([5, 2**24, 2**24 + PAGE - 1], device=kernel_device)
    for where, cache in ((places, small), (far, kv)):
        rotary_kv_write(qkv, positions, cos, sin, where, cache, 2, 1)
    assert torch.equal(kv[:, far], small[:, places])
