"""The decoder layer that EAGLE heads train: Llama's, on the library's ops.

    a   = x_residual + o_proj(attention(rotary(q_proj x), rotary(k_proj x), v_proj x))
    out = a + down_proj(SiLU(gate_proj n) * up_proj n)          n = post_attention_layernorm(a)

The head chooses what enters the attention and what is added to it. Submodules have the names of Hugging Face's files.
Not here: caches, drafting (the engine has its own packed layer), rope types whose angles depend on the length of the text.

Letters: B rows of a batch, T tokens per row, H hidden size, D head dimension.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import nn

from ..kernels.attention.rotary import rotary
from ..kernels.training.trained_rms_norm import trained_rms_norm
from ..kernels.training.trained_silu_mul import trained_silu_mul

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_THETA = 10000.0  # of heads whose target has no rope
_RANGE = ("of at least", "above")  # by LayerConfig's least


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape of a head with one decoder layer; names as in transformers' LlamaConfig. `vocab_size` is the target's."""

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": ..., and its parameters}; None is "default"
    attention_bias: bool = False  # of q, k and v
    max_position_embeddings: int = 2048
    num_speculative_tokens: int = 5  # default depth of drafts
    base_model_name_or_path: str = ""

    may_be_zero = ()  # names of numbers whose 0 means that the head lacks the part

    def __post_init__(self):
        name = type(self).__name__
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in self.may_be_zero else 1
            if field.type is int and (type(value) is not int or value < least):
                raise ValueError(f"{name}.{field.name} must be a whole number of at least {least}, got {value!r}")
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{name}.{field.name} must be true or false, got {value!r}")
            if field.type is float:
                number = type(value) in (int, float) and 0 <= value < math.inf
                if not number or (value == 0 and least):
                    raise ValueError(f"{name}.{field.name} must be a number {_RANGE[least]} 0, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{name}.num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"{name}.head_dim must be even, got {self.head_dim}")
        if self.rope_parameters["rope_type"] not in ROPE_TYPES:
            raise ValueError(
                f"{name}.rope_scaling has the rope_type {self.rope_parameters['rope_type']!r}, expected one of "
                f"{', '.join(ROPE_TYPES)}"
            )

    @classmethod
    def for_target(cls, target_config, **changes):
        """The config of a head whose layer, a Llama's, has the sizes of the target's layers, and a rope if they have none.

        target_config: the target's transformers config (of a multimodal one, its text part counts); changes: fields with
        other values. Raises ValueError for a layer that such a head cannot have.
        """
        text = target_config.get_text_config()
        rope = _rope_of_whole_text(text)
        theta = rope.pop("rope_theta")
        num_heads = text.num_attention_heads
        taken = {
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "intermediate_size": intermediate_size_of(text),
            "num_attention_heads": num_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_theta": float(theta),
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "max_position_embeddings": text.max_position_embeddings,
        }
        return cls(**taken | changes)

    @property
    def rope_parameters(self):
        """Both rope fields as transformers 5 has them."""
        return {"rope_type": "default", "rope_theta": self.rope_theta, **(self.rope_scaling or {})}

    def llama_config(self):
        """The transformers config of a Llama with this one layer."""
        from transformers import LlamaConfig

        names = (
            "hidden_size",
            "vocab_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
        names += ("rms_norm_eps", "attention_bias", "max_position_embeddings", "rope_parameters")
        return LlamaConfig(num_hidden_layers=1, **{name: getattr(self, name) for name in names})


def intermediate_size_of(text):
    """The width of the MLP of a target with this text config."""
    found = (getattr(text, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    return next((size for size in found if isinstance(size, int)), 4 * text.hidden_size)


def _rope_of_whole_text(text):
    """A copy of a text config's rope parameters. If layer types have their own, those of the layers that see the whole text.

    A head rotates whole heads, and a target without rope has none to copy.
    """
    rope = getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": ROPE_THETA}
    if any(isinstance(value, dict) for value in rope.values()):
        if not isinstance(rope.get("full_attention"), dict):
            raise ValueError(
                f"the {text.model_type} target has rope parameters for layers of {', '.join(rope)}, but none for full_attention, "
                "which such a head's layer has: take another target, or train Medusa heads"
            )
        rope = rope["full_attention"]
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


class Rotary:
    """cos and sin of the angles of positions, in fp32 or wider. Not an nn.Module, so nothing is stored with the weights."""

    def __init__(self, config):
        self.config, self.frequencies, self.scaling = config, {}, 1.0

    def __call__(self, position_ids, dtype):
        """position_ids [B, T] -> two [B T, D/2]"""
        wide, device = torch.promote_types(dtype, torch.float32), position_ids.device
        if device not in self.frequencies:
            frequencies, self.scaling = rope_frequencies(self.config)
            self.frequencies[device] = frequencies.to(device)
        angles = position_ids.flatten()[:, None].to(wide) * self.frequencies[device].to(wide)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rope_frequencies(config):
    """Angle per position of every pair, with the config's rope scaling: (fp32 [D/2] on the CPU, factor of cos and sin)."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config.llama_config(), device="cpu")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the dtype of x.  [..., H] -> [..., H]"""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return trained_rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output.  [B, T, input_size] -> [B, T, H]"""

    def __init__(self, config, input_size):
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x, rotation, attention):
        """rotation: (cos, sin) of Rotary; attention: PackedAttention"""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, heads, D]
        q, k = (rotary(one.flatten(0, 1), *rotation).view(shape) for one in (q, k))
        out = attention.attend(*(one.transpose(1, 2) for one in (q, k, v)))  # [B, HQ, T, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down_proj(SiLU(gate_proj x) * up_proj x).  [..., H] -> [..., H]"""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(trained_silu_mul(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP with their residuals, without a norm before the attention."""

    def __init__(self, config, input_size):
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, residual, rotation, attention):
        """x [B, T, input_size] is attended to, residual [B, T, H] is added -> [B, T, H]"""
        residual = residual + self.self_attn(x, rotation, attention)
        return residual + self.mlp(self.post_attention_layernorm(residual))


def share_embedding(weight, vocab_size, hidden_size):
    """A frozen embedding on the target's own table, which is not copied; ValueError if it is of another shape."""
    if tuple(weight.shape) != (vocab_size, hidden_size):
        raise ValueError(
            f"the target's embedding is {tuple(weight.shape)}, the head's config says (vocab_size, hidden_size) = "
            f"{(vocab_size, hidden_size)}: this head was made for another target"
        )
    return nn.Embedding.from_pretrained(weight.detach(), freeze=True)


def check_embedding(embed_tokens):
    """ValueError for a head that has no embedding yet: its file held none, and take_embedding was not called."""
    if embed_tokens is None:
        raise ValueError(
            "this head's file holds no embed_tokens: call head.take_embedding(the target's table [V, H]) first"
        )
