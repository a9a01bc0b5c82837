"""RMSNorms of transformers: whose formula is ours."""

import pytest
import torch
from torch import nn

from headstart.inference.models.modules.fixed_rope import in_force
from headstart.inference.models.modules.norm_modules import norm_changes, norms_of, same_norm
from headstart.tests.inference.models.small_architectures import small_model

# Norms per model: two a layer and the last; of Qwen 3, two of heads as well.
COUNTS = {"llama": 5, "mixtral": 5, "qwen3": 9, "gemma": 0, "gemma3_text": 0, "opt": 0, "olmo2": 9}


@pytest.mark.parametrize("model_type", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_the_formula_are_found_and_others_are_not(model_type, dtype):
    assert len(norms_of(small_model(model_type, dtype))) == COUNTS[model_type]


class LikeRMSNorm(nn.Module):
    """Another formula, or another eps."""

    def __init__(self, formula, eps):
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(48)), eps, formula

    def forward(self, x):
        return self.formula(x, self.weight)


def scaled(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("formula", "same"),
    [
        (lambda x, w: scaled(x, 1e-6) * w, True),
        (lambda x, w: scaled(x, 1e-5) * w, False),
        (lambda x, w: scaled(x, 1e-6) * (1 + w), False),
        (lambda x, w: scaled(x - x.mean(-1, keepdim=True), 1e-6) * w, False),
        (lambda x, w: scaled(x, 1e-6), False),
    ],
    ids=["ours", "eps", "1 + w", "centred", "no weight"],
)
def test_formulas_that_weights_of_one_or_large_rows_would_hide_are_told_apart(formula, same):
    assert same_norm(LikeRMSNorm(formula, 1e-6)) == same


def test_a_replaced_forward_leaves_nothing_behind():
    model = small_model("llama")
    norm, x = model.model.norm, torch.randn(3, 48)
    with in_force(norm_changes(model, ["model.norm"])), torch.no_grad():
        assert "forward" in vars(norm)
        found = norm(x)
    assert "forward" not in vars(norm)
    torch.testing.assert_close(norm(x), found)
