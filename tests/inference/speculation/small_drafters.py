"""Random heads and draft models of every kind for a small target, and outputs with and without them.

Almost every draft of a random head is wrong, so the code that drops drafts runs all the time. With the target as its own draft
model every draft is right.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.inference.sampling_params import SamplingParams

VOCAB, DEPTH = 97, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (1, 63, 130, 2, 17, 64, 3, 65)  # of the prompts: below, at and across pages; eight, as many as run at once
ALONE = 3  # number of them that are also run one at a time, which takes most of the time
TEMPERATURES = (0.0, 0.8)


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    tokens = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None)
    config = LlamaConfig(**shape | changes, **tokens, max_position_embeddings=512, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def make(name, target):
    """A drafter by its name."""
    config = target.config
    torch.manual_seed(7)
    if name == "medusa":
        head = Medusa(MedusaConfig(config.hidden_size, VOCAB, DEPTH))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return head
    if name.startswith("mlp"):
        plain = dict(tie_weights=False, scale_input=False) if name == "mlp-untied" else {}
        return MLPSpeculator(MLPSpeculatorConfig(config.hidden_size, VOCAB, 32, DEPTH, **plain))
    if name == "eagle":
        head = Eagle(EagleConfig.for_target(config, fc_bias=True, attention_bias=True))
    elif name == "eagle3":
        head = Eagle3(Eagle3Config.for_target(config, aux_layer_ids=(0, 2, 4), draft_vocab_size=40))
        chosen = torch.randperm(VOCAB)[:40].sort().values
        head.set_draft_vocabulary(chosen - torch.arange(40), torch.isin(torch.arange(VOCAB), chosen))
    elif name.startswith("block"):
        special = {
            "block-causal": dict(is_causal=True, num_speculative_tokens=DEPTH + 3),
            "block-edge": dict(edge_rank=8, sample_from_anchor=True),
            "block-sure": dict(edge_rank=8, confidence=True),
            "block-sliding": dict(edge_rank=8, sliding_layers=(0,), sliding_window=20, window_of_block=True),
            "block-dflash2": dict(selector_rank=8, conv_kernel_size=2),
        }
        shape = dict(num_hidden_layers=2, mask_token_id=5, num_speculative_tokens=DEPTH, aux_layer_ids=(1, 3))
        shape |= special.get(name, {})
        head = BlockHead(BlockConfig.for_target(config, **shape))
    elif name == "eagle3-narrow":  # of another width, over the whole vocabulary, one feature
        shape = dict(hidden_size=32, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1)
        head = Eagle3(Eagle3Config.for_target(config, aux_layer_ids=(3,), norm_before_residual=True, **shape))
    else:
        return {"target": target, "model": llama(1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)}[name]
    for parameter in head.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    if not isinstance(head, Eagle3) or not head.config.own_embedding:
        head.take_embedding(target.model.embed_tokens.weight)
    return head


def prompts_and_params(temperature, count=None, max_tokens=7, **changes):
    """The first `count` prompts, all unless told, each with a seed of its own."""
    generator = torch.Generator().manual_seed(4)  # at which every drafter has a token or more accepted
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS[:count]]
    common = dict(temperature=temperature, max_tokens=max_tokens) | changes
    return prompts, [SamplingParams(seed=i, **common) for i in range(len(prompts))]


def outputs(llm, temperature, **changes):
    found = [x.outputs[0] for x in llm.generate(*prompts_and_params(temperature, **changes))]
    return [(x.token_ids, x.logprobs) for x in found]
