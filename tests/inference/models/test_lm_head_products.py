"""What lm_head gives before a target scales or caps its logits: block drafters start from that (heads/block.py)."""

import pytest
import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.inference.models.small_architectures import small_model

PLAIN = ("llama", "qwen3_moe")
# Their logits are divided, capped, or multiplied; the first one runs on our kernels, the others as modules.
SCALED = {
    "granite": dict(logits_scaling=5.0),
    "granitemoe": dict(logits_scaling=5.0),
    "gemma2": dict(final_logit_softcapping=2.0),
    "cohere": dict(logit_scale=0.1),
}


@pytest.mark.parametrize("kind", [*PLAIN, *SCALED])
@torch.no_grad()
def test_products_are_lm_head_s_alone(kind):
    model = small_model(kind, **SCALED.get(kind, {}))
    decoder = LLM(model, max_num_seqs=2).engine.decoder
    rows, lm_head = torch.randn(5, model.config.hidden_size), model.get_output_embeddings()
    torch.testing.assert_close(decoder.products(rows), lm_head(rows), rtol=1e-5, atol=1e-5)
    assert torch.equal(decoder.products(rows), decoder.logits(rows)) == (kind in PLAIN)


@pytest.mark.parametrize("kind", SCALED)
def test_a_block_drafter_takes_its_own_scales_and_not_the_target_s(kind):
    """And its drafts, whatever they are, change no token."""
    model = small_model(kind, **SCALED[kind])
    scales = dict(output_multiplier=0.5, final_logit_softcapping=3.0)
    torch.manual_seed(1)
    shape = dict(mask_token_id=5, aux_layer_ids=(1,), num_speculative_tokens=3, edge_rank=4)
    head = BlockHead(BlockConfig.for_target(model.config, **shape | scales))
    head.take_embedding(model.get_input_embeddings().weight.detach())
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain, drafting = LLM(model), LLM(model, speculative_config={"model": head})
    found = [llm.generate([[1, 2, 3]], [params])[0].outputs[0].token_ids for llm in (plain, drafting)]
    assert found[0] == found[1]
    drafter, states = drafting.engine.drafter, torch.randn(2, 3, model.config.hidden_size)
    with torch.no_grad():
        drafter.states = lambda batch, num_depths: states
        wanted = 3 * torch.tanh(0.5 * model.get_output_embeddings()(states) / 3)
        torch.testing.assert_close(drafter.marginals(None, 2), wanted, rtol=1e-5, atol=1e-5)
