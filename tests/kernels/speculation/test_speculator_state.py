"""The MLP speculator's state: the head's own step, whatever the number of parts and rows."""

import pytest
import torch

from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.kernels.speculation.speculator_state import speculator_state, speculator_state_reference


def operands(device, dtype, parts=3, rows=7, width=50, vocab=11):
    generator = torch.Generator().manual_seed(rows)
    wide = torch.float32 if parts > 1 else dtype
    x = torch.randn(parts, rows, width, generator=generator).to(device, wide)
    tokens = torch.randint(vocab, (rows,), generator=generator).to(device)
    table, w, b = (
        torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((vocab, width), (width,), (width,))
    )
    return x, tokens, table, 2.7, w, b


@pytest.mark.parametrize(("parts", "rows", "width"), [(1, 1, 32), (3, 7, 50), (2, 20, 257)])
def test_the_kernel_is_the_formula(kernel_device, parts, rows, width):
    given = operands(kernel_device, torch.float32, parts, rows, width)
    expected = speculator_state_reference(
        *(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given), 1e-6
    )
    assert (speculator_state(*given).double() - expected).abs().max() < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_as_the_formula(dtype):
    given = operands("cuda", dtype, 4, 64, 3072, 1000)
    expected = speculator_state_reference(*given, 1e-6).float()
    found = speculator_state(*given).float()
    assert (found - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found == expected).float().mean() > 0.99


def test_a_rows_bits_do_not_depend_on_the_others(kernel_device):
    x, tokens, *rest = operands(kernel_device, torch.float32, 2, 9)
    whole = speculator_state(x, tokens, *rest)
    for row in range(9):
        assert torch.equal(speculator_state(x[:, row : row + 1], tokens[row : row + 1], *rest)[0], whole[row])


@pytest.mark.parametrize("tie_weights", [True, False])
def test_it_is_the_heads_own_step(tie_weights):
    torch.manual_seed(0)
    head = MLPSpeculator(MLPSpeculatorConfig(24, 31, 16, 3, tie_weights=tie_weights)).double()
    for norm in head.ln:
        torch.nn.init.normal_(norm.bias)
    state, tokens = torch.randn(5, 24).double(), torch.randint(31, (5,))
    for depth in range(3):
        emb, proj, ln, _ = head.modules_of(depth)
        multiplier = head.token_weight / head.state_weight
        found = speculator_state(proj(state)[None], tokens, emb.weight, multiplier, ln.weight, ln.bias, head.epsilon)
        state = head.step(state, tokens, depth)
        assert torch.allclose(found, state, rtol=1e-12, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    x, tokens, table, multiplier, w, b = operands("cpu", torch.float32)
    with pytest.raises(ValueError, match=r"takes parts \[S, M, 50\] for 7 tokens"):
        speculator_state(x[:, :5], tokens, table, multiplier, w, b)
    with pytest.raises(ValueError, match="got"):
        speculator_state(x, tokens, table, multiplier, w[:3], b)
