"""The target model as the engine runs it: a Llama-family decoder on our kernels, over the paged cache, for draft trees.

Built on a loaded Hugging Face module. q, k, v and gate, up are packed into one product each, and the module's own weights
become views of the packed ones, so the module and the engine share one copy. Families: see SUPPORTED.
Not supported yet: sliding windows, dynamic rope scaling, tensor parallelism, quantised weights.

Letters: B requests, N nodes per request, M = B N rows, H hidden, V vocabulary, HQ and HK query and key heads, D head dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear
from ..kernels.rms_norm import add_rms_norm, rms_norm
from ..kernels.rotary import rotary
from ..kernels.silu_mul import silu_mul
from ..kernels.tree_attention import ROWS, tree_attention

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class UnsupportedArchitecture(ValueError):
    """The engine does not run this target yet; the message lists what it runs."""


@dataclass(frozen=True)
class ForwardPass:
    """What one pass over B x N nodes needs besides the tokens."""

    tokens: torch.Tensor  # [B, N]
    positions: torch.Tensor  # [B, N]
    write_rows: torch.Tensor  # [B N HK] rows of the cache that take the nodes' keys and values
    index: object  # kernels.tree_attention.TreeIndex


def check_supported(config):
    """Raise UnsupportedArchitecture if the engine cannot run a target with this Hugging Face config."""

    def refuse(what):
        raise UnsupportedArchitecture(
            f"the engine does not run {what} yet. It runs model types {', '.join(SUPPORTED)} with full attention, "
            f"rope types {', '.join(STATIC_ROPE)} and up to {ROWS} query heads per key head."
        )

    if config.model_type not in SUPPORTED:
        refuse(f"model type {config.model_type!r}")
    if getattr(config, "hidden_act", "silu") != "silu":
        refuse(f"activation {config.hidden_act!r}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []) or (
        config.model_type == "mistral" and config.sliding_window is not None
    ):
        refuse("sliding-window attention")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        refuse(f"rope type {rope!r}")
    if config.num_attention_heads > ROWS * config.num_key_value_heads:
        refuse(f"{config.num_attention_heads} query heads on {config.num_key_value_heads} key heads")
    if getattr(config, "quantization_config", None):
        refuse("quantised weights")


def check_plain_linear(layer):
    """Raise UnsupportedArchitecture for anything but a plain Linear: an adapter or a quantised layer computes something else."""
    if type(layer) is not nn.Linear:
        raise UnsupportedArchitecture(
            f"the engine does not run layers of type {type(layer).__module__}.{type(layer).__name__} yet, only plain Linear "
            "ones: merge adapters into the weights first (merge_and_unload), and load without quantisation"
        )


def pack_rows(linears):
    """One weight [sum of N, K] (and bias) for several Linear modules, which become views of it.

    Modules packed before (an earlier engine on the same module) are recognised, not copied again.
    """

    for layer in linears:
        check_plain_linear(layer)

    def pack(parameters):
        first = parameters[0].data
        step, adjacent = first.data_ptr(), True
        for parameter in parameters:
            adjacent &= parameter.data_ptr() == step and parameter.is_contiguous()
            adjacent &= parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            step += parameter.nbytes
        rows = sum(parameter.shape[0] for parameter in parameters)
        if adjacent:
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        packed = torch.cat([parameter.data for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = packed[start : start + parameter.shape[0]]
            start += parameter.shape[0]
        return packed

    biases = [layer.bias for layer in linears]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        raise UnsupportedArchitecture("the engine does not run packed products of which only some have a bias")
    return pack([layer.weight for layer in linears]), None if biases[0] is None else pack(biases)


class DecoderLayer:
    """One layer's weights, packed."""

    def __init__(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        for linear_layer in (attention.o_proj, mlp.down_proj):
            check_plain_linear(linear_layer)
        self.qkv = pack_rows([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = (attention.o_proj.weight.data, None if attention.o_proj.bias is None else attention.o_proj.bias.data)
        self.gate_up = pack_rows([mlp.gate_proj, mlp.up_proj])
        self.down = (mlp.down_proj.weight.data, None if mlp.down_proj.bias is None else mlp.down_proj.bias.data)
        self.input_norm = layer.input_layernorm.weight.data
        self.post_norm = layer.post_attention_layernorm.weight.data
        self.q_norm = attention.q_norm.weight.data if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight.data if hasattr(attention, "k_norm") else None


class Decoder:
    """The target on our kernels.

    module: a loaded *ForCausalLM of a supported family, whose weights are shared. max_positions: length of the rotary table.
    """

    def __init__(self, module, max_positions):
        config = module.config
        check_supported(config)
        check_plain_linear(module.lm_head)
        if module.lm_head.bias is not None:
            raise UnsupportedArchitecture("the engine does not run an lm_head with a bias yet")
        with torch.no_grad():
            self.layers = [DecoderLayer(layer) for layer in module.model.layers]
        self.embedding = module.model.embed_tokens.weight.data
        self.norm = module.model.norm.weight.data
        self.lm_head = module.lm_head.weight.data
        self.eps = config.rms_norm_eps
        self.vocab_size, self.hidden_size = self.lm_head.shape
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        rope = module.model.rotary_emb
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        angles = torch.arange(max_positions, device=self.device)[:, None].to(wide) * rope.inv_freq.to(wide)
        self.cos = angles.cos() * rope.attention_scaling  # [positions, D/2]
        self.sin = angles.sin() * rope.attention_scaling

    def forward(self, batch, kv):
        """Final hidden states (after the final norm) of all nodes; writes their KV.

        batch: a ForwardPass; kv [layers, 2, rows, D]  ->  [B, N, H]
        """
        num_requests, num_nodes = batch.tokens.shape
        hq, hk = self.num_heads, self.num_kv_heads
        positions = batch.positions.flatten()
        cos, sin = self.cos[positions], self.sin[positions]  # [M, D/2]
        residual = F.embedding(batch.tokens.flatten(), self.embedding)  # [M, H]
        x = None
        for layer, layer_kv in zip(self.layers, kv):
            if x is None:
                x = rms_norm(residual, layer.input_norm, self.eps)
            else:
                x, residual = add_rms_norm(x, residual, layer.input_norm, self.eps)
            qkv = linear(x, *layer.qkv).view(-1, hq + 2 * hk, self.head_dim)
            qk = qkv[:, : hq + hk]
            if layer.q_norm is not None:
                q, k = qk.split((hq, hk), 1)
                qk = torch.cat((rms_norm(q, layer.q_norm, self.eps), rms_norm(k, layer.k_norm, self.eps)), 1)
            qk = rotary(qk, cos, sin)
            new = torch.stack((qk[:, hq:], qkv[:, hq + hk :])).view(2, -1, self.head_dim)  # [2, M HK, D]
            layer_kv.index_copy_(1, batch.write_rows, new)
            q = qk[:, :hq].view(num_requests, num_nodes, hq, self.head_dim)
            x = tree_attention(q, layer_kv, batch.index).view(-1, hq * self.head_dim).to(self.dtype)
            x, residual = add_rms_norm(linear(x, *layer.out), residual, layer.post_norm, self.eps)
            x = linear(silu_mul(linear(x, *layer.gate_up)), *layer.down)
        x, _ = add_rms_norm(x, residual, self.norm, self.eps)
        return x.view(num_requests, num_nodes, -1)

    def logits(self, hidden):
        """lm_head over hidden states, in fp32 at least.  [M, H] -> [M, V]"""
        logits = linear(hidden, self.lm_head)
        return logits if logits.dtype == torch.float64 else logits.float()
