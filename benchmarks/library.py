"""The baseline: the target's pass over the same weights and nodes with library operations, cuBLAS and scaled_dot_product_attention.

It is written as a reasonable user would: F.linear, SDPA's fastest backend for the shape on this machine (measured when the step is
built), a mask over the tree, keys and values of each request in one dense block, norms, rotation and activation through
torch.compile or as plain operators, all in one CUDA graph. Its bits depend on the number of rows; the engine never uses it.
Not covered: Granite's multipliers (they cost nothing) and sliding windows.

Letters: B requests, N nodes, M = B N rows, HQ and HK query and key heads, G = HQ / HK, D head dimension, S = L + N keys.
"""

import functools
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..evaluation.timing import Repeatable

# SDPA backends for a mask, grouped heads and few queries. None: torch's own choice (the only one on the CPU).
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ELEMENTWISE = ("compiled", "eager")


def add_norm(x, residual, weight, eps):
    residual = residual + x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def rotate(qk, cos, sin):
    """qk [..., heads, D], cos and sin [..., 1, D / 2] -> as qk"""
    a, b = qk.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(qk.dtype)


def activate(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def elementwise_functions(elementwise):
    functions = (add_norm, rotate, activate)
    return functions if elementwise == "eager" else tuple(torch.compile(f, dynamic=True) for f in functions)


def _plain(w):
    """The weights as F.linear takes them: on the CPU the decoder holds them in another layout (pack_weight)."""
    return w if w.layout is torch.strided else w.to_dense()


def library_products(decoder, rows):
    """A function that multiplies `rows` rows with every weight of the decoder, once each."""
    weights = [_plain(decoder.lm_head)]
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        weights += [_plain(one.weight) for one in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def multiply():
        for w in weights:
            F.linear(inputs[w.shape[1]], w)

    return multiply


class LibraryAttention:
    """Attention of N nodes per request over S dense keys, by SDPA's fastest backend for the shape on this machine.

    mask: bool [N, S], or None if every node sees every key. `backend` is the chosen one.
    """

    def __init__(self, batch, num_nodes, *, num_heads, num_kv_heads, head_dim, mask, dtype, device):
        self.shape = (batch, num_nodes, num_kv_heads, num_heads // num_kv_heads, head_dim)
        self.mask, self.backend = None, None
        if mask is not None:
            # Queries of one key head are folded into the rows, without a copy of the keys. The row stride is a multiple of 16, as
            # the kernels require of a mask; otherwise they would copy it in every layer.
            rows = mask.repeat_interleave(self.shape[3], 0)  # [N G, S]
            keys = rows.shape[1]
            padded = torch.zeros(rows.shape[0], keys + -keys % 16, dtype=dtype, device=device)
            self.mask = padded[:, :keys].masked_fill_(~rows, -torch.inf)

    def __call__(self, q, keys, values):
        """q [B, N, HQ, D], keys and values [B, HK, S, D] -> [B, N, HQ, D]"""
        batch, nodes, kv_heads, group, dim = self.shape
        q = q.reshape(self.shape).transpose(1, 2).reshape(batch, kv_heads, nodes * group, dim)
        with nullcontext() if self.backend is None else sdpa_kernel(BACKENDS[self.backend]):
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
        out = out.view(batch, kv_heads, nodes, group, dim).transpose(1, 2)
        return out.reshape(batch, nodes, kv_heads * group, dim)

    def choose(self, q, kv):
        """Take the fastest backend for q [B, N, HQ, D] over the layers of kv [layers, 2, B, HK, S, D]."""
        if not q.is_cuda:
            return self
        found = {}
        for name in BACKENDS:
            if name == "flash" and self.mask is not None:
                continue  # this backend takes no mask
            self.backend = name
            try:
                work = Repeatable(lambda: [self(q, *layer) for layer in kv[:8]], q.device)
                found[name] = work.time(repeats=5).p50
            except RuntimeError:
                continue  # this backend does not take the shape
        self.backend = min(found, key=found.get) if found else None
        return self


class LibraryStep:
    """The target's pass over B x N nodes after `context` tokens each: embedding, layers, lm_head, argmax per node.

    decoder: Decoder, whose weights are read; tree: TreeOnDevice; keys: a flat tensor of the decoder's dtype that holds at least
    layers * 2 * B * HK * (context + N) * D numbers; elementwise: "compiled" or "eager".
    """

    def __init__(self, decoder, batch, context, tree, keys, elementwise="compiled"):
        nodes, device = tree.num_nodes, decoder.device
        shape = (len(decoder.layers), 2, batch, decoder.num_kv_heads, context + nodes, decoder.head_dim)
        self.decoder, self.nodes = decoder, nodes
        self.kv = keys[: torch.Size(shape).numel()].view(shape)
        self.tokens = torch.randint(decoder.vocab_size, (batch, nodes), device=device)
        positions = (context + tree.depths).expand(batch, nodes)
        self.cos, self.sin = (
            table[positions][:, :, None] for table in (decoder.rotary.cos, decoder.rotary.sin)
        )  # [B, N, 1, D / 2]
        mask = None
        if nodes > 1:
            own = torch.zeros(nodes, nodes, dtype=torch.bool, device=device)
            own.scatter_(1, tree.ancestors.long(), True)  # a node sees its ancestors and itself
            mask = torch.cat((torch.ones(nodes, context, dtype=torch.bool, device=device), own), 1)
        self.attention = LibraryAttention(
            batch,
            nodes,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            mask=mask,
            dtype=decoder.dtype,
            device=device,
        )
        q = torch.randn(batch, nodes, decoder.num_heads, decoder.head_dim, device=device, dtype=decoder.dtype)
        self.attention.choose(q, self.kv)
        self.add_norm, self.rotate, self.activate = elementwise_functions(elementwise)
        self.products = [
            [
                (_plain(one.weight), one.bias)
                for one in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
            ]
            for layer in decoder.layers
        ]

    def __call__(self):
        """-> the target's tokens [B, N]"""
        decoder, hq, hk = self.decoder, self.decoder.num_heads, self.decoder.num_kv_heads
        batch, nodes = self.tokens.shape
        residual = F.embedding(self.tokens.flatten(), decoder.embedding)  # [M, H]
        x = torch.zeros_like(residual)
        for layer, (qkv_product, out, gate_up, down), kv in zip(decoder.layers, self.products, self.kv):
            attention, norm = layer.attention, layer.input_norm
            x, residual = self.add_norm(x, residual, norm.weight, norm.eps)
            qkv = F.linear(x, *qkv_product).view(batch, nodes, hq + 2 * hk, decoder.head_dim)
            q, k, v = qkv.split((hq, hk, hk), 2)
            if attention.q_norm is not None:
                q = F.rms_norm(q, (decoder.head_dim,), attention.q_norm, attention.eps)
                k = F.rms_norm(k, (decoder.head_dim,), attention.k_norm, attention.eps)
            new = kv[..., -nodes:, :].transpose(2, 3)  # [2, B, N, HK, D]
            new[0].copy_(self.rotate(k, self.cos, self.sin))
            new[1].copy_(v)
            q = self.rotate(q, self.cos, self.sin)
            x = self.attention(q, kv[0], kv[1]).view(batch * nodes, -1)
            norm = layer.post_norm
            x, residual = self.add_norm(F.linear(x, *out), residual, norm.weight, norm.eps)
            x = F.linear(self.activate(F.linear(x, *gate_up)), *down)
        x, _ = self.add_norm(x, residual, decoder.norm.weight, decoder.norm.eps)
        return F.linear(x, decoder.lm_head).argmax(-1).view(batch, nodes)
