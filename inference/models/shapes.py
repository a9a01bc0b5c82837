"""Named shapes of published models, for benchmarks and tests without a checkpoint: random weights have the same speed.

    config = config_of("llama-3-8b")        # a transformers config
    how = dict(dtype=torch.bfloat16, device="cuda", max_positions=4096)
    decoder = Decoder.from_pretrained(None, config, load_format="dummy", **how)

No special tokens are set: random weights end no output.
"""

_LLAMA_3 = dict(
    model_type="llama",
    vocab_size=128256,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
_LLAMA_3_8B = _LLAMA_3 | dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128
)

_MISTRAL_7B = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=32768,
)
_OPT = dict(model_type="opt", vocab_size=50272, max_position_embeddings=2048, do_layer_norm_before=True)

# The arguments of each model's config. Llama 3 is taken in its 3.1 form, whose positions reach 131072.
SHAPES = {
    "llama-3-8b": _LLAMA_3_8B,
    # The 8B's width at a sixteenth of its depth: what the bit-equality suite runs.
    "llama-3-8b-2layers": _LLAMA_3_8B | dict(num_hidden_layers=2),
    "llama-3-70b": _LLAMA_3
    | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128),
    "llama-2-7b": dict(
        model_type="llama",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    # v0.1, the one with a sliding window.
    "mistral-7b": _MISTRAL_7B
    | dict(model_type="mistral", sliding_window=4096, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "qwen2.5-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "opt-6.7b": _OPT
    | dict(hidden_size=4096, word_embed_proj_dim=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=32),
    "opt-125m": _OPT
    | dict(hidden_size=768, word_embed_proj_dim=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12),
    # 48 query heads on one key head.
    "granite-20b-code": dict(
        model_type="gpt_bigcode",
        vocab_size=49152,
        n_embd=6144,
        n_inner=24576,
        n_layer=52,
        n_head=48,
        n_positions=8192,
        multi_query=True,
        activation_function="gelu",
    ),
    "mixtral-8x7b": _MISTRAL_7B
    | dict(
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
}


def config_of(name):
    """The transformers config of a named shape; ValueError listing the names for an unknown one."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}: choose one of {', '.join(sorted(SHAPES))}")
    return AutoConfig.for_model(**SHAPES[name], bos_token_id=None, eos_token_id=None)
