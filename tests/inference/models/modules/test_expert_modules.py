"""Experts of transformers' modules on our products: every layout and gate of the library's; the module is afterwards as before."""

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.inference.models import canary
from headstart.inference.models.modules import expert_modules
from headstart.inference.models.modules.attention_plug import NAME
from headstart.inference.models.modules.expert_modules import expert_weights
from headstart.inference.models.modules.module_decoder import ModuleDecoder, lay_out_products
from headstart.inference.models.modules.module_source import on_meta
from headstart.inference.models.modules.module_trial import trial
from headstart.inference.models.modules.row_ops import RowOps, UnsupportedOperation
from headstart.kernels.linear.experts import tile_of_pairs
from headstart.tests.inference.models.small_architectures import MIXTURES, small_config, small_model

LAYOUTS = ("mixtral", "aria_text", "gpt_oss", "minimax_m3_vl_text", "beam")


def experts_of(model):
    return next(part for part in model.modules() if expert_weights(part))


def routed(model, rows=9, top=3):
    """Rows, the experts that they choose, and weights."""
    generator = torch.Generator().manual_seed(0)
    weights, index = torch.rand(rows, 5, generator=generator).topk(top, dim=1)
    return torch.randn(rows, model.config.hidden_size, generator=generator), index, weights


def on_ours(part, given):
    part.config._experts_implementation = NAME
    try:
        with torch.inference_mode(), RowOps():
            return part(*given)
    finally:
        part.config._experts_implementation = "eager"


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_experts_of_every_layout_compute_what_the_librarys_do(model_type):
    """Plain, transposed, with biases and alternating features, and with gates of their own."""
    more = {} if model_type in MIXTURES else dict(num_local_experts=5, head_dim=8, intermediate_size=40)
    model = small_model(model_type, **more)
    LLM(model, max_model_len=60)  # makes our name known
    part, given = experts_of(model), routed(model)
    part.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = part(*given)  # one expert after the other
        before = [weight.clone() for weight in part.parameters()]
        lay_out_products(model)
    assert all(map(torch.equal, part.parameters(), before))
    found = on_ours(part, given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    alone = [on_ours(part, [one[i : i + 1] for one in given]) for i in range(len(given[0]))]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_mixtures_of_a_module_are_seen_in_its_trial(model_type):
    mixtures = trial(on_meta(small_config(model_type)), 256).mixtures
    assert {num for _, num in mixtures} <= {5, 8}
    assert mixtures


def test_the_config_is_what_it_was_and_no_router_logits_are_collected(monkeypatch):
    model = small_model("qwen3_moe")
    model.config.output_router_logits = True
    before, seen, experts = model.config._experts_implementation, [], expert_modules.experts

    def looking(*args):
        seen.append((model.config._experts_implementation, model.config.output_router_logits))
        return experts(*args)

    monkeypatch.setattr(expert_modules, "experts", looking)
    LLM(model, max_model_len=60).generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert set(seen) == {(NAME, False)}
    assert (model.config._experts_implementation, model.config.output_router_logits) == (before, True)
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[1, 2, 3]])).router_logits is not None


def test_experts_that_are_computed_otherwise_are_refused_by_name():
    part = experts_of(on_meta(small_config("mixtral")))
    part.has_post_expert_norm = True
    with pytest.raises(UnsupportedOperation, match="a norm after each expert"):
        expert_modules.run_experts(part, *(one.to("meta") for one in routed(part)))


def test_numbers_of_rows_take_every_tile_of_the_experts():
    decoder = ModuleDecoder(small_model("mixtral"), 100)
    assert decoder._mixtures == {(3, 5)}
    tiles = {tile_of_pairs(rows, 3 * rows, 5) for rows in decoder.row_counts(200)}
    assert tiles == {16, 32, 64, 128}


def test_the_canary_finds_experts_that_look_at_other_rows(monkeypatch):
    decoder = LLM(small_model("mixtral"), max_model_len=100).engine.decoder
    assert canary.find_fault(decoder) is None
    experts = expert_modules.experts
    monkeypatch.setattr(expert_modules, "experts", lambda x, *args: experts(x, *args) + (1e-6 if len(x) > 10 else 0))
    assert "other bits" in canary.find_fault(decoder)
