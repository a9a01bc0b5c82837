"""The target model as the engine runs it: a Llama-family decoder on our kernels, over the paged cache, for draft trees.

    decoder = Decoder.from_pretrained(folder_or_id, config, torch.bfloat16, "cuda", max_positions)     # its own weights
    decoder = Decoder.from_module(module, max_positions)                                               # the module's weights

All requests' rows lie side by side, and row r is the same bits whatever the other rows are. Partial sums of a split product go
straight into the next op. Families, rope types and limits: see SUPPORTED and check_supported. Not yet: tensor parallelism,
quantised weights, partial rotation, mixtures of experts.

Letters: B requests, N nodes per request, M = B N rows, H hidden, V vocabulary, HQ and HK query and key heads, D head dimension,
P positions.
"""

from dataclasses import dataclass

import torch

from ...kernels.attention.rotary_kv_write import rotary_kv_write
from ...kernels.attention.tree_attention import MAX_DIM, MAX_GROUP
from ...kernels.embedding import embed
from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.linear.linear import linear, linear_parts
from ...kernels.rms_norm import add_rms_norm, rms_norm
from .weights import UnsupportedArchitecture, head_dim_of, load_weights, random_weights, weights_of_module

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "granite")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class ForwardPass:
    """What one pass over M rows needs."""

    tokens: torch.Tensor  # [M]
    positions: torch.Tensor  # [M]
    cache_slots: torch.Tensor  # [M] page * 64 + offset of each row's own token
    attention: (
        object  # the index of kernels/attention/tree_attention.py or prefill_attention.py: what its `attend` looks at
    )


def check_supported(config):
    """Raise UnsupportedArchitecture if the engine cannot run a target with this Hugging Face config."""

    def refuse(what):
        raise UnsupportedArchitecture(
            f"the engine does not run {what} yet. It runs model types {', '.join(SUPPORTED)} with full or sliding-window "
            f"attention, rope types {', '.join(STATIC_ROPE)}, up to {MAX_GROUP} query heads per key head and even head "
            f"dimensions up to {MAX_DIM}, unquantised, on one device (no tensor parallelism)."
        )

    if config.model_type not in SUPPORTED:
        refuse(f"model type {config.model_type!r}")
    if config.hidden_act not in ("silu", "swish"):
        refuse(f"activation {config.hidden_act!r}")
    known = ("full_attention", "sliding_attention") if config.model_type in ("qwen2", "qwen3") else ("full_attention",)
    if config.model_type != "mistral":  # its sliding_window holds for every layer, whatever layer_types says
        for kind in getattr(config, "layer_types", None) or []:
            if kind not in known:
                refuse(f"layers of type {kind!r} in a {config.model_type} model")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        refuse(f"rope type {rope['rope_type']!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1:
        refuse(f"partial rotation ({rope['partial_rotary_factor']} of each head)")
    if config.num_attention_heads % config.num_key_value_heads or (
        config.num_attention_heads > MAX_GROUP * config.num_key_value_heads
    ):
        refuse(f"{config.num_attention_heads} query heads on {config.num_key_value_heads} key heads")
    if head_dim_of(config) > MAX_DIM or head_dim_of(config) % 2:
        refuse(f"a head dimension of {head_dim_of(config)}")
    if getattr(config, "quantization_config", None):
        refuse("quantised weights")


def windows_of(config):
    """How many positions each layer sees, its own included; None: all."""
    if config.model_type == "mistral":
        return [config.sliding_window] * config.num_hidden_layers
    if config.model_type in ("qwen2", "qwen3"):
        return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    return [None] * config.num_hidden_layers


def rotary_tables(config, num_positions, dtype=torch.float32):
    """cos and sin of every position's angles, with the config's rope scaling.  -> two [P, D/2], on the CPU"""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind == "default":
        dim = head_dim_of(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inv_freq, scaling = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    angles = torch.arange(num_positions)[:, None].to(dtype) * inv_freq.to(dtype)
    return angles.cos() * scaling, angles.sin() * scaling


class Decoder:
    """The target on our kernels.

    weights: DecoderWeights; config: the Hugging Face config they belong to; max_positions: length P of the rotary table.
    Raises UnsupportedArchitecture for a config that does not run.
    """

    def __init__(self, weights, config, max_positions):
        check_supported(config)
        self.layers, self.embedding, self.norm = weights.layers, weights.embedding, weights.norm
        self.lm_head = weights.lm_head
        self.eps = config.rms_norm_eps
        self.vocab_size, self.hidden_size = self.lm_head.shape
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        # A window that no position reaches is none.
        self.windows = [None if w is None or w >= max_positions else w for w in windows_of(config)]
        # Granite's four constants; None and 1 for everybody else.
        granite = config.model_type == "granite"
        self.attention_scale = config.attention_multiplier if granite else None
        self.embedding_multiplier = config.embedding_multiplier if granite else 1.0
        self.residual_multiplier = config.residual_multiplier if granite else 1.0
        self.logits_scaling = config.logits_scaling if granite else 1.0
        wide = torch.promote_types(self.dtype, torch.float32)
        self.cos, self.sin = (table.to(self.device) for table in rotary_tables(config, max_positions, wide))

    @property
    def kv_shape(self):
        """(layers, key heads, head dimension, dtype) of its cache."""
        return len(self.layers), self.num_kv_heads, self.head_dim, self.dtype

    @classmethod
    def from_module(cls, module, max_positions):
        """On a loaded *ForCausalLM, whose weights become views of the packed ones: both share one copy."""
        check_supported(module.config)
        return cls(weights_of_module(module), module.config, max_positions)

    @classmethod
    def from_pretrained(cls, folder_or_id, config, dtype, device, max_positions, load_format="auto", adapter=None):
        """With weights of its own: a folder's or Hub id's safetensors, tensor by tensor onto the device, or random ones.

        config: the model's Hugging Face config; dtype: torch.dtype of the weights, whatever the files hold; load_format: "auto"
        or "dummy" (random weights of the config's shape; folder_or_id is not looked at); adapter: an Adapter to add to the
        weights (not to random ones), or None. Raises ValueError, naming files and
        tensors, before anything is read: see weights.load_weights.
        """
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
        check_supported(config)
        if load_format == "dummy":
            weights = random_weights(config, dtype, device)
        else:
            weights = load_weights(folder_or_id, config, dtype, device, adapter)
        return cls(weights, config, max_positions)

    def forward(self, batch, kv, streams=()):
        """Hidden states behind the final norm of all rows, and what a drafter reads; writes keys and values into the cache.

        batch: a ForwardPass of M rows; kv [layers, 2, rows, D]; streams: layers whose input's residual stream is the drafter's
        feature, ascending (the number of layers: behind the last one), side by side  ->  hidden [M, H], feature [M, A H]; without
        streams the feature is the hidden state
        """
        residual = embed(batch.tokens, self.embedding, self.embedding_multiplier)  # [M, H]
        parts = None  # [S, M, H] what the layer before adds to the residual
        entering = []  # [M, H] the residual streams entering the layers
        for layer, window, layer_kv in zip(self.layers, self.windows, kv):
            if parts is None:
                x = rms_norm(residual, layer.input_norm, self.eps)
            else:
                x, residual = add_rms_norm(parts, residual, layer.input_norm, self.eps, self.residual_multiplier)
            entering.append(residual)
            parts, residual = run_layer(self, layer, x, residual, batch, layer_kv, window)
        x, residual = add_rms_norm(parts, residual, self.norm, self.eps, self.residual_multiplier)
        entering.append(residual)
        return x, torch.cat([entering[i] for i in streams], 1) if streams else x

    def logits(self, hidden):
        """lm_head over hidden states [M, H] -> [M, V], in the model's dtype on a GPU and in fp32 at least on the CPU."""
        logits = linear(hidden, self.lm_head)
        if self.logits_scaling != 1:
            logits = logits / self.logits_scaling
        return logits if logits.is_cuda or logits.dtype == torch.float64 else logits.float()


def run_layer(model, layer, x, residual, batch, layer_kv, window=None):
    """Attention and MLP of one layer over M rows; writes their keys and values.

    model: a Decoder, or a drafter with its num_heads, num_kv_heads, cos, sin, eps, attention_scale and residual_multiplier; layer:
    LayerWeights; x [M, K]: what q, k and v read; residual [M, H]; batch: ForwardPass; layer_kv [2, rows, D]
    ->  parts [S, M, H] that are still to be added, residual [M, H]
    """
    q = rotary_kv_write(
        linear_parts(x, *layer.qkv),
        batch.positions,
        model.cos,
        model.sin,
        batch.cache_slots,
        layer_kv,
        model.num_heads,
        model.num_kv_heads,
        layer.q_norm,
        layer.k_norm,
        model.eps,
    )  # [M, HQ, D]
    x = batch.attention.attend(q, layer_kv, scale=model.attention_scale, window=window)
    parts = linear_parts(x.flatten(1), *layer.out)
    x, residual = add_rms_norm(parts, residual, layer.post_norm, model.eps, model.residual_multiplier)
    return linear_parts(gate_up_silu(x, *layer.gate_up), *layer.down), residual
