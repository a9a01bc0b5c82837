"""A whole layer of a module at the widths of published models: a row has the same bits alone and among 10,000 others.

Every request has a short random context and a chain of five new tokens. One pass computes all chains; the same rows are then
computed in smaller passes: alone, as plain decoding takes them, in a chain, among the rows of other requests, and as prompts.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from headstart.inference.engine.cache import PagedCache
from headstart.inference.models.decoder import ForwardPass
from headstart.inference.models.modules import deferred, fused_ops
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.kernels.attention.prefill_attention import build_prefill_index
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.kernels.jit import on_triton

NODES, LONGEST, VOCAB = 5, 40, 512
_SHARED = dict(vocab_size=VOCAB, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None)
_GROUPED = _SHARED | dict(num_hidden_layers=1, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
REAL = {
    "llama": _GROUPED | dict(intermediate_size=14336),
    "opt": _SHARED
    | dict(hidden_size=4096, word_embed_proj_dim=4096, ffn_dim=16384, num_hidden_layers=1, num_attention_heads=32),
    "mixtral": _GROUPED | dict(intermediate_size=512, num_local_experts=8),
    # 48 query heads on one key head of 128 dimensions.
    "gpt_bigcode": dict(vocab_size=VOCAB, n_embd=6144, n_inner=24576, n_layer=1, n_head=48, n_positions=256)
    | dict(multi_query=True, bos_token_id=None, eos_token_id=None, pad_token_id=None),
}
_SMALL_GROUPED = _GROUPED | dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
SMALL = {
    "llama": _SMALL_GROUPED | dict(intermediate_size=80),
    "opt": REAL["opt"] | dict(hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_attention_heads=4),
    "mixtral": _SMALL_GROUPED | dict(intermediate_size=40, num_local_experts=5),
    "gpt_bigcode": REAL["gpt_bigcode"] | dict(n_embd=48, n_inner=80, n_head=6),
}


class Rows:
    """Requests with contexts in a cache, and passes over their new tokens."""

    def __init__(self, config, dtype, device, num_requests):
        how = dict(dtype=dtype, device=torch.device(device), max_positions=LONGEST + NODES, load_format="dummy")
        self.decoder = ModuleDecoder.from_pretrained(None, config, **how)
        torch.manual_seed(0)
        for parameter in self.decoder.module.parameters():  # biases and norms start as constants
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        self.cache = PagedCache(num_requests, *self.decoder.kv_shape, self.decoder.device)
        self.cache.kv.normal_()
        self.table = (1 + torch.randperm(num_requests)).to(device)[:, None]  # [B, 1] a page holds a request
        self.lengths = torch.randint(0, LONGEST, (num_requests,)).to(device)
        self.tokens = torch.randint(0, VOCAB, (num_requests, NODES)).to(device)

    def find(self, which, first=0, count=NODES, as_prompts=False):
        """Hidden states and logits of `count` tokens from the first on, of these requests.  -> [len(which), count, H + V]"""
        table, device = self.table[which], self.decoder.device
        chain, committed = torch.arange(count, device=device), self.lengths[which] + first
        positions = (committed[:, None] + chain).flatten()
        rows = (table * PAGE).expand(-1, count).flatten() + positions
        heads = self.decoder.num_kv_heads
        if as_prompts:
            index = build_prefill_index(table, committed.cpu(), [count] * len(table), heads, device)
        else:
            above = chain.expand(count, -1).contiguous()
            index = build_tree_index(table, committed, chain, above, heads, self.decoder.dtype, is_chain=True)
        batch = ForwardPass(self.tokens[which, first : first + count].flatten(), positions, rows, index)
        hidden, _ = self.decoder.forward(batch, self.cache.kv)
        return torch.cat((hidden, self.decoder.logits(hidden).to(hidden.dtype)), 1).view(len(table), count, -1)


def differing(rows):
    """[(how rows were computed, how many of them have other bits than among all)] of all passes, and of keys and values."""
    num_requests = len(rows.table)
    everyone = rows.find(torch.arange(num_requests))
    kv, found = rows.cache.kv.clone(), []

    def compare(how, which, first=0, count=NODES, **options):
        expected = everyone[which, first : first + count]
        num = int((rows.find(which, first, count, **options) != expected).any(2).sum())
        found.append((how, num + int((rows.cache.kv != kv).sum())))

    assert everyone.isfinite().all()
    assert (everyone[0] != everyone[1]).any(1).all()
    scattered = torch.randperm(num_requests)
    ends = torch.tensor([0, num_requests - 1])
    for request in (*ends.tolist(), *scattered[:2].tolist()):
        compare("a chain", torch.tensor([request]))
        for node in range(NODES):
            compare("a row alone", torch.tensor([request]), node, 1)
    for count in (64, 300):
        some = torch.cat((ends, scattered))[: min(count, num_requests)]
        compare(f"{count} rows of as many requests", some, 2, 1)
        compare(f"{count} rows in chains", some[: count // NODES])
    if on_triton(kv):
        compare("prompts", scattered, as_prompts=True)
        compare("one prompt", ends[1:], as_prompts=True)
    return [(how, num) for how, num in found if num]


def make_rows(shapes, model_type, dtype, device, num_rows):
    return Rows(AutoConfig.for_model(model_type, **shapes[model_type]), dtype, device, num_rows // NODES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", SMALL)
def test_a_small_layers_row_has_the_same_bits_in_any_company(model_type, dtype):
    assert differing(make_rows(SMALL, model_type, dtype, "cpu", 300)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", REAL)
def test_a_real_layers_row_has_the_same_bits_among_10000(model_type):
    assert differing(make_rows(REAL, model_type, torch.bfloat16, "cuda", 10_000)) == []


# --- what it would show ---


def library_parts(x, w, b=None, out=None):
    return F.linear(x, w, b)[None]


def norm_by_number_of_rows(x, w, eps):
    """As the library's mean on a GPU, which cuts a row into pieces by how many rows there are."""
    pieces = x.float().square().chunk(2 if len(x) < 100 else 1, -1)
    mean = sum(piece.sum(-1, keepdim=True) for piece in pieces) / x.shape[-1]
    return (x * torch.rsqrt(mean + eps)).to(x.dtype) * w


def add_norm_by_number_of_rows(x, residual, w, eps, multiplier):
    total = x[0] + residual
    return norm_by_number_of_rows(total, w, eps), total


@pytest.mark.parametrize("model_type", SMALL)
def test_a_librarys_order_of_sums_in_products_is_found(model_type, monkeypatch):
    rows = make_rows(SMALL, model_type, torch.float32, "cpu", 300)
    monkeypatch.setattr(deferred, "linear_parts", library_parts)
    assert "a row alone" in dict(differing(rows))


def test_a_librarys_order_of_sums_in_norms_is_found(monkeypatch):
    rows = make_rows(SMALL, "llama", torch.float32, "cpu", 300)
    monkeypatch.setattr(fused_ops, "add_rms_norm", add_norm_by_number_of_rows)
    assert "a row alone" in dict(differing(rows))


@pytest.mark.gpu
def test_a_librarys_order_of_sums_is_found_at_real_widths(monkeypatch):
    rows = make_rows(REAL, "opt", torch.bfloat16, "cuda", 10_000)
    monkeypatch.setattr(deferred, "linear_parts", library_parts)
    assert "a row alone" in dict(differing(rows))
