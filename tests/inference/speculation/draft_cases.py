"""The configurations of heads whose drafts test_draft_matrix.py compares."""

from headstart.heads.block import BlockHead
from headstart.heads.eagle import Eagle
from headstart.heads.eagle3 import Eagle3
from headstart.heads.medusa import Medusa
from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.tests.inference.speculation.draft_matrix import VOCAB

# What differs from the target's own shape and the defaults, by the test's id. `layers`: of the target, 2 unless told.
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
NARROW = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
OTHER = dict(intermediate_size=112, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
LAYERS = dict(aux_layer_ids=(0, 1, 2))
BLOCK = dict(aux_layer_ids=(0, 1), mask_token_id=5, num_hidden_layers=2, num_speculative_tokens=3)
SCALES = dict(output_multiplier=1.6, final_logit_softcapping=30.0, input_embedding_scale=2.5)
CASES = {
    "medusa-blocks1-own_lm_head": (Medusa, dict(num_layers=1)),
    "medusa-blocks1-shared_lm_head": (Medusa, dict(num_layers=1, shared_lm_head=True)),
    "medusa-blocks2-own_lm_head": (Medusa, dict(num_layers=2)),
    "medusa-blocks2-shared_lm_head": (Medusa, dict(num_layers=2, shared_lm_head=True)),
    "medusa-blocks3-heads4": (Medusa, dict(num_layers=3, num_heads=4)),
    "mlp-tied-scaled": (MLPSpeculator, dict(tie_weights=True, scale_input=True)),
    "mlp-tied-plain": (MLPSpeculator, dict(tie_weights=True, scale_input=False)),
    "mlp-untied-scaled": (MLPSpeculator, dict(tie_weights=False, scale_input=True)),
    "mlp-untied-plain": (MLPSpeculator, dict(tie_weights=False, scale_input=False)),
    "mlp-tied-steps4-as_wide_as_target": (MLPSpeculator, dict(num_steps=4, inner_size=64)),
    "mlp-untied-steps4-wider": (MLPSpeculator, dict(num_steps=4, inner_size=80, tie_weights=False)),
    "eagle-plain": (Eagle, dict(embedding="target's")),
    "eagle-biases": (Eagle, dict(embedding="target's", fc_bias=True, attention_bias=True)),
    "eagle-fc_bias": (Eagle, dict(embedding="none", fc_bias=True)),
    "eagle-attention_bias": (Eagle, dict(embedding="target's", attention_bias=True)),
    "eagle-own_embedding": (Eagle, dict(embedding="own")),
    "eagle-other_layer": (
        Eagle,
        dict(
            embedding="target's",
            **OTHER,
            rms_norm_eps=0.3,
            rope_theta=50.0,
            num_speculative_tokens=4,
        ),
    ),
    "eagle-rope_linear": (Eagle, dict(embedding="target's", rope_scaling=dict(rope_type="linear", factor=3.0))),
    "eagle-rope_llama3": (Eagle, dict(embedding="target's", rope_scaling=dict(rope_type="llama3", **LLAMA3))),
    "eagle-rope_yarn": (Eagle, dict(embedding="target's", rope_scaling=YARN, max_position_embeddings=128)),
    "eagle3-plain": (Eagle3, dict(embedding="target's", **LAYERS)),
    "eagle3-draft_vocabulary": (Eagle3, dict(embedding="target's", draft_vocab_size=40, **LAYERS)),
    "eagle3-norm_before_residual": (Eagle3, dict(embedding="target's", norm_before_residual=True, **LAYERS)),
    "eagle3-attention_bias": (Eagle3, dict(embedding="none", attention_bias=True, **LAYERS)),
    "eagle3-own_embedding": (Eagle3, dict(embedding="own", **LAYERS)),
    "eagle3-one_layer": (Eagle3, dict(embedding="target's", aux_layer_ids=(1,))),
    "eagle3-default_layers": (Eagle3, dict(embedding="none", aux_layer_ids=None, layers=7)),
    "eagle3-narrow": (Eagle3, dict(embedding="own", **NARROW, **LAYERS)),
    "eagle3-narrow-all": (
        Eagle3,
        dict(
            embedding="own",
            draft_vocab_size=40,
            norm_before_residual=True,
            attention_bias=True,
            aux_layer_ids=(0, 2),
            num_speculative_tokens=4,
            rms_norm_eps=0.3,
            **NARROW,
        ),
    ),
    "eagle3-other_layer": (
        Eagle3,
        dict(
            embedding="target's",
            **OTHER,
            rope_theta=50.0,
            **LAYERS,
        ),
    ),
    "eagle3-rope_linear": (Eagle3, dict(embedding="none", rope_scaling=dict(rope_type="linear", factor=3.0), **LAYERS)),
    "eagle3-rope_llama3": (Eagle3, dict(embedding="none", rope_scaling=dict(rope_type="llama3", **LLAMA3), **LAYERS)),
    "block-plain": (BlockHead, dict(embedding="target's", **BLOCK)),
    "block-causal": (BlockHead, dict(embedding="none", is_causal=True, **BLOCK)),
    "block-one_layer": (BlockHead, dict(embedding="none", **BLOCK | dict(num_hidden_layers=1, aux_layer_ids=(1,)))),
    "block-other_layers": (
        BlockHead,
        dict(
            embedding="target's",
            **OTHER,
            rms_norm_eps=0.3,
            rope_theta=50.0,
            layers=7,
            **BLOCK | dict(mask_token_id=9, num_speculative_tokens=4, num_target_layers=None, aux_layer_ids=(2, 5)),
        ),
    ),
    "block-rope_linear": (
        BlockHead,
        dict(embedding="none", rope_scaling=dict(rope_type="linear", factor=3.0), **BLOCK),
    ),
    "block-rope_llama3": (BlockHead, dict(embedding="none", rope_scaling=dict(rope_type="llama3", **LLAMA3), **BLOCK)),
    "block-rope_yarn": (BlockHead, dict(embedding="none", rope_scaling=YARN, max_position_embeddings=128, **BLOCK)),
    "block-edge": (BlockHead, dict(embedding="none", edge_rank=8, **BLOCK)),
    "block-edge-anchored": (BlockHead, dict(embedding="target's", edge_rank=5, sample_from_anchor=True, **BLOCK)),
    "block-edge-draft_vocabulary": (BlockHead, dict(embedding="none", edge_rank=8, draft_vocab_size=40, **BLOCK)),
    "block-sliding": (BlockHead, dict(embedding="none", sliding_layers=(0,), sliding_window=9, **BLOCK)),
    "block-sliding-causal": (
        BlockHead,
        dict(
            embedding="none",
            edge_rank=8,
            sliding_layers=(0, 1),
            sliding_window=6,
            sliding_is_causal=True,
            is_causal=True,
            **BLOCK,
        ),
    ),
    "block-sliding-of_block": (
        BlockHead,
        dict(embedding="none", sliding_layers=(1,), sliding_window=5, window_of_block=True, **BLOCK),
    ),
    "block-sliding-of_block-causal": (
        BlockHead,
        dict(
            embedding="none",
            sliding_layers=(0,),
            sliding_window=7,
            window_of_block=True,
            sliding_is_causal=True,
            **BLOCK | dict(num_speculative_tokens=4),
        ),
    ),
    "block-dflash2": (BlockHead, dict(embedding="none", selector_rank=8, conv_kernel_size=2, **BLOCK)),
    "block-selector": (
        BlockHead,
        dict(embedding="target's", selector_rank=5, selector_top_k=4, sample_from_anchor=True, **BLOCK),
    ),
    "block-convolutions-causal": (
        BlockHead,
        dict(embedding="none", conv_kernel_size=3, conv_group_size=4, draft_vocab_size=40, is_causal=True, **BLOCK),
    ),
    "block-scaled": (BlockHead, dict(embedding="target's", **SCALES, **BLOCK)),
    "block-scaled-edge": (
        BlockHead,
        dict(embedding="none", edge_rank=8, draft_vocab_size=40, **SCALES | dict(output_multiplier=1.0), **BLOCK),
    ),
    "block-scaled-dflash2": (
        BlockHead,
        dict(embedding="none", selector_rank=8, selector_top_k=5, conv_kernel_size=2, **SCALES, **BLOCK),
    ),
    "block-own_tables": (BlockHead, dict(embedding="own", draft_vocab_size=VOCAB, **BLOCK)),
    "eagle3-rope_yarn": (Eagle3, dict(embedding="none", rope_scaling=YARN, max_position_embeddings=128, **LAYERS)),
}
