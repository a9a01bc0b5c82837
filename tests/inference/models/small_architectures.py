"""Small random models of many architectures of transformers, with sizes that divide nothing evenly."""

import torch
import transformers
from packaging.version import Version

VOCAB = 97
_SMALL = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=256)
_GROUPED = _SMALL | dict(intermediate_size=80, num_key_value_heads=2)
_HEADS_OF_10 = _GROUPED | dict(head_dim=10)
_OF_GPT_2 = dict(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=256)

ARCHITECTURES = {
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "biogpt": _SMALL | dict(intermediate_size=80),
    "bitnet": _GROUPED,
    "cohere": _GROUPED,
    "cohere2": _GROUPED | dict(sliding_window=12),
    "ernie4_5": _HEADS_OF_10,
    "exaone4": _GROUPED | dict(sliding_window=12),
    "gemma": _HEADS_OF_10,
    "gemma2": _HEADS_OF_10 | dict(sliding_window=12, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": _HEADS_OF_10 | dict(sliding_window=12, layer_types=["sliding_attention", "full_attention"]),
    "glm": _GROUPED | dict(head_dim=8, pad_token_id=0),
    "glm4": _GROUPED | dict(head_dim=8, pad_token_id=0),
    "gpt2": _OF_GPT_2,
    "gpt_bigcode": _OF_GPT_2 | dict(n_inner=80, multi_query=True),
    "gpt_neox": _SMALL | dict(intermediate_size=80),
    "gpt_oss": _HEADS_OF_10 | dict(sliding_window=12, num_local_experts=5, num_experts_per_tok=2),
    "helium": _GROUPED | dict(head_dim=8),
    "hunyuan_v1_dense": _HEADS_OF_10,
    "nemotron": _GROUPED,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": _GROUPED | dict(sliding_window=12),
    "opt": _SMALL | dict(word_embed_proj_dim=48, ffn_dim=80),
    "persimmon": _SMALL | dict(intermediate_size=80),
    "phi": _GROUPED,
    "phi3": _GROUPED | dict(pad_token_id=0),
    "seed_oss": _HEADS_OF_10,
    "smollm3": _GROUPED | dict(pad_token_id=0),
    "stablelm": _GROUPED,
    "vaultgemma": _HEADS_OF_10 | dict(sliding_window=12, attn_logit_softcapping=2.0),
    "starcoder2": _GROUPED | dict(sliding_window=12),
}

# Mixtures of experts: the second of two layers has them, or both.
_EXPERTS = _GROUPED | dict(
    moe_intermediate_size=40,
    num_experts=5,
    num_local_experts=5,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    pad_token_id=0,
)
_LATENT = _EXPERTS | dict(
    num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
)
MIXTURES = {
    "afmoe": _EXPERTS | dict(num_dense_layers=1, sliding_window=12),
    "aria_text": _EXPERTS | dict(moe_num_experts=5, moe_topk=3),
    "axk1": _LATENT | dict(n_group=1, topk_group=1),
    "beam": _EXPERTS | dict(mlp_layer_types=["dense", "sparse"], n_group=1, topk_group=1, sliding_window=12),
    "cohere2_moe": _EXPERTS | dict(sliding_window=12),
    "deepseek_v3": _LATENT | dict(num_local_experts=8, n_group=4, topk_group=2),
    "dots1": _EXPERTS | dict(n_group=1, topk_group=1, n_shared_experts=1),
    "ernie4_5_moe": _EXPERTS | dict(moe_num_experts=5, moe_k=3, moe_layer_start_index=1),
    "exaone_moe": _EXPERTS | dict(sliding_window=12),
    "flex_olmo": _EXPERTS,
    "glm4_moe": _EXPERTS | dict(head_dim=8),
    "glm4_moe_lite": _LATENT,
    "granitemoe": _EXPERTS,
    "granitemoeshared": _EXPERTS | dict(shared_intermediate_size=40),
    "hunyuan_v1_moe": _EXPERTS | dict(head_dim=10, moe_topk=3),
    "hy_v3": _EXPERTS,
    "kolibri1": _EXPERTS,
    "laguna": _EXPERTS,
    "mellum": _EXPERTS,
    "minimax_m2": _EXPERTS | dict(head_dim=8),
    "minimax_m3_vl_text": _EXPERTS,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "qwen2_moe": _EXPERTS | dict(shared_expert_intermediate_size=40),
    "qwen3_moe": _EXPERTS | dict(head_dim=10),
    "solar_open": _EXPERTS,
}
ARCHITECTURES |= MIXTURES
# Older versions of the library do not have these, or compute them by operations that are refused.
if Version(transformers.__version__) < Version("5.23"):
    for newer in ("aria_text", "beam", "kolibri1"):
        del ARCHITECTURES[newer], MIXTURES[newer]


def small_config(model_type, **changes):
    """The config of a small model without an EOS."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **ARCHITECTURES.get(model_type, _GROUPED) | changes)
    config.bos_token_id = config.eos_token_id = None
    return config


def small_model(model_type, dtype=torch.float32, **changes):
    """A random model, spread wide enough that tokens differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # Eager, because not every attention of the library knows soft caps and sinks.
    config = small_config(model_type, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 0.3 * noise if parameter.dim() > 1 else parameter.data + 0.05 * noise
    model.generation_config.eos_token_id = None
    return model
