"""The canary: before a decoder serves, it shows on its own device that a row's bits do not depend on what is computed beside it.

- Products and norms of the first layer, and lm_head, with the decoder's own weights on random rows: a row alone has the bits of the
  same row among many, in the first place and in the last.
- Attention with the layers' heads, scale and windows over a small random cache: a node has the same bits after committed keys, in a
  tree whose keys lie between those of siblings, in a chain, in a batch and, on a GPU, in a prompt. The nodes cross the borders of a
  tile and of chunks.

Success is kept in a small file of the user's cache folder, per device, versions, numerics (kernels/numerics.py) and shapes, so
that the next start does not repeat it. Not checked: sampling and verifiers, which add over the vocabulary in one fixed shape per
row, and the layers of heads, which only draft.

Letters: M rows, N x K a weight, L committed length, P pages, HQ and HK query and key heads, D head dimension.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ... import __version__
from ...heads.storage.atomic_write import write_json
from ...kernels.attention.kv_commit import kv_rows
from ...kernels.attention.prefill_attention import build_prefill_index
from ...kernels.attention.tree_attention import PAGE, build_tree_index
from ...kernels.jit import INTERPRETED, on_device, on_triton
from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.numerics import Numerics
from .decoder import ForwardPass

# Numbers of rows. On a GPU they take the decode kernel and both ways of the prefill kernels; on the CPU one block, several, a call.
GPU_ROWS, CPU_ROWS = (64, 300, 2048), (5, 17, 64)
# Committed lengths from which NODES nodes follow: they cross a tile, a chunk, and the first of the longer chunks. The CPU has none.
GPU_LENGTHS, CPU_LENGTHS = (60, 252, 2044), (60, 252)
NODES = 8
MANY = 128  # requests of a batch on a GPU, where one program then walks all chunks


def check_exactness(decoder):
    """Run the canary, unless it has passed on this device with these versions and shapes.

    In Triton's interpreter, where it would take minutes, nothing is checked. Raises RuntimeError with what differs, the versions
    and the device: then nothing may be served.
    """
    if INTERPRETED:
        return
    numerics = Numerics.of(decoder.device, decoder.dtype)
    proven = asdict(numerics) | _shapes(decoder)
    path = record_path(proven)
    if decoder.ranks.least(_is_recorded(path, proven)):  # ranks check together, or none does
        return
    with torch.no_grad(), on_device(decoder.device):
        fault = find_fault(decoder)
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # for the KV cache, which takes what is free
    if fault:
        raise RuntimeError(
            f"the check at start-up failed, and nothing is served: {fault}. Outputs would depend on the requests beside "
            f"them, and speculation could change them. Seen with headstart {__version__}, torch {numerics.torch}, triton "
            f"{numerics.triton}, numerics {numerics.version} ({numerics.digest}), {numerics.dtype} on {numerics.device}. Report "
            "this message as an issue of headstart; until it is mended, use the versions of torch and triton in constraints.txt, "
            "or another device"
        )
    with contextlib.suppress(OSError):  # a folder that cannot be written: the next start checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, proven)


# --- the record of a success ---


def record_path(proven):
    """The file that says that the canary has passed with these facts (a dict)."""
    name = hashlib.sha256(json.dumps(proven, sort_keys=True).encode()).hexdigest()[:16]
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "headstart" / f"canary-{name}.json"


def _is_recorded(path, proven):
    try:
        return json.loads(path.read_text(encoding="utf-8")) == proven
    except (OSError, ValueError):  # no file, or not one of ours
        return False


def _shapes(decoder):
    """What decides, beside the numerics, which kernels run and how."""
    common = {
        "headstart": __version__,
        "kernels": "triton" if on_triton(decoder.embedding) else f"torch, {torch.get_num_threads()} threads",
    }
    if decoder.ranks.size > 1:
        common["rank"] = [decoder.ranks.rank, decoder.ranks.size]
        common["sums"] = decoder.ranks.way
    if not decoder.is_packed:
        import transformers

        config = decoder.module.config.to_json_string(use_diff=False)
        return common | {"transformers": transformers.__version__, "config": json.loads(config)}
    attention = decoder.layers[0].attention
    return common | {
        "products": {product.name: [*product.shape, product.biased] for product in _products(decoder)},
        "heads": [attention.num_heads, attention.num_kv_heads, decoder.head_dim],
        "scale": attention.options.scale,
        "windows": _windows(decoder),
    }


def _windows(decoder):
    """The windows of the layers, each once: None for a layer that sees all positions."""
    return sorted({layer.attention.options.window for layer in decoder.layers}, key=lambda window: window or 0)


# --- what is shown ---


def find_fault(decoder):
    """What differs, in words; None if the canary passes."""
    if not decoder.is_packed:
        return _fault_of_pass(decoder)
    for product in _products(decoder):
        if fault := _fault_of_rows(product, decoder):
            return fault
    for window in _windows(decoder):
        for length in GPU_LENGTHS if on_triton(decoder.embedding) else CPU_LENGTHS:
            if fault := _fault_of_attention(decoder, length, window):
                return fault
    return None


@dataclass(frozen=True)
class _Product:
    """A product, or a norm, that takes rows one by one."""

    name: str
    shape: tuple  # [N, K] of the weight, [K] of a norm's
    biased: bool
    compute: object  # [M, K] -> [M, ...]


def _products(decoder):
    """Those of the first layer, and lm_head, in the order of a pass."""
    layer = decoder.layers[0]
    attention, mlp, up, norm = layer.attention, layer.mlp, layer.mlp.gate_up, layer.post_norm

    def total(linear, x):
        """The sum of its parts as the next kernel adds them."""
        parts = linear.parts(x)
        if linear.in_pairs:  # of several ranks
            return norm(torch.zeros(len(x), linear.shape[0], dtype=decoder.dtype, device=decoder.device), parts)[1]
        first, *others = parts
        for part in others:
            first = first + part
        return first.to(decoder.dtype)

    def out_and_norm(x):
        return torch.cat(norm(total(attention.out, x), attention.out.parts(x)), 1)

    def product(name, linear, compute):
        return _Product(name, linear.shape, linear.bias is not None, compute)

    return [
        _Product("input_norm", tuple(layer.input_norm.weight.shape), False, lambda x: layer.input_norm(x)[0]),
        product("qkv", attention.qkv, lambda x: total(attention.qkv, x)),
        product("out", attention.out, lambda x: total(attention.out, x)),
        product("post_norm after out", attention.out, out_and_norm),
        product("gate_up_silu", up, lambda x: gate_up_silu(x, up.weight, up.bias, splits=up.splits)),
        product("down", mlp.down, lambda x: total(mlp.down, x)),
        _Product("lm_head", tuple(decoder.lm_head.shape), False, decoder.logits),
    ]


def _fault_of_rows(product, decoder):
    """The product of a row alone, then among more and more rows: those of fewer rows come first, and the first one also last."""
    counts = GPU_ROWS if on_triton(decoder.embedding) else CPU_ROWS
    x = _random(0, counts[-1], product.shape[-1], decoder=decoder)
    x[[count - 1 for count in counts]] = x[0].clone()
    known = alone = product.compute(x[:1])
    for count in counts:
        found = product.compute(x[:count])
        if _differ(found[: len(known)], known).any() or _differ(found[-1:], alone).any():
            among = "alone" if len(known) == 1 else f"alone or among {len(known)}"
            return f"{product.name} {list(product.shape)} gives a row other bits among {count} rows than {among}"
        known = found
    return None


def _fault_of_pass(decoder):
    """A whole pass over the first token of a request, alone and among those of more and more others."""
    counts, device = (1, *(GPU_ROWS if on_triton(decoder.embedding) else CPU_ROWS)), decoder.device
    layers, hk, dim, dtype = decoder.kv_shape
    kv = torch.zeros(layers, 2, (counts[-1] + 1) * hk * PAGE, dim, dtype=dtype, device=device)
    node = torch.zeros(1, dtype=torch.int64, device=device)
    alone = None
    for count in counts:
        pages = torch.arange(1, count + 1, device=device)
        tokens, zeros = torch.arange(count, device=device) % decoder.vocab_size, torch.zeros_like(pages)
        index = build_tree_index(pages[:, None], zeros, node, node[None], hk, dtype)
        hidden, _ = decoder.forward(ForwardPass(tokens, zeros, pages * PAGE, index), kv)
        found = torch.cat((hidden[:1].float(), decoder.logits(hidden)[:1].float()), 1)
        alone = found if alone is None else alone
        if _differ(found, alone).any():
            return f"a pass gives a row other bits among {count} rows than alone"
    return None


def _fault_of_attention(decoder, length, window):
    """NODES nodes at the positions from `length` on, each alone after its committed keys, then in all kinds of company."""
    attention = decoder.layers[0].attention
    alone, found = _attended(attention, decoder, length, window)
    for company, rows in found.items():
        differ = _differ(rows, alone).flatten(2).any(2).any(0)  # [NODES]
        if differ.any():
            position = length + int(differ.nonzero()[0])
            return (
                f"attention ({attention.num_heads} heads on {attention.num_kv_heads} of {decoder.head_dim}, window {window}) gives "
                f"the node at position {position} other bits {company} than alone after {position} committed keys"
            )
    return None


def _attended(attention, decoder, length, window):
    """-> results of the nodes alone [NODES, HQ, D], {company: results of a number of times the same nodes [times, NODES, HQ, D]}"""
    hq, hk, dim, device = attention.num_heads, attention.num_kv_heads, decoder.head_dim, decoder.device
    options = replace(attention.options, window=window)
    num_pages = -(-(length + 2 * NODES) // PAGE)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).to(device)[None] + 1  # [1, P]
    queries = _random(1, 2 * NODES - 1, hq, dim, decoder=decoder)
    keys = _random(2, 2, length + NODES, hk, dim, decoder=decoder)
    noise = _random(3, 2, (num_pages + 1) * hk * PAGE, dim, decoder=decoder)

    def cache(places):
        """kv [2, rows, D]: the committed keys, those of the nodes at these places, and noise everywhere else."""
        kv, places = noise.clone(), torch.tensor([[*range(length), *places]], device=device)
        kv[:, kv_rows(table, places, hk).flatten()] = keys.flatten(1, 2)
        return kv

    def attend(q, kv, committed, depths, ancestors, is_chain=False):
        """One tree per entry of `committed`, all with the same nodes.  q [N, HQ, D] -> [number of trees, N, HQ, D]"""
        many, committed = len(committed), torch.tensor(committed, device=device)
        nodes = depths.to(device), ancestors.to(device)
        index = build_tree_index(table.expand(many, -1), committed, *nodes, hk, decoder.dtype, is_chain)
        q = q.repeat(many * len(depths) // len(q), 1, 1)
        return index.attend(q, kv, options).view(many, -1, hq, dim)

    # Node 2 d of the tree stands at depth d. Node 2 d - 1 is its sibling, and its key is noise. What follows a node among its
    # ancestors is to be ignored: here it is the nodes below it, so that a key too many shows.
    step, tree, q = torch.arange(NODES), torch.arange(2 * NODES - 1), queries[::2].contiguous()
    chain, root = (step, step.expand(NODES, -1)), (step[:1], step[None, :1])
    depths = (tree + 1) // 2
    ancestors = torch.where(step == depths[:, None], tree[:, None], 2 * step)
    in_order, in_tree = cache(range(length, length + NODES)), cache(range(length, length + 2 * NODES, 2))
    alone = torch.cat([attend(q[i : i + 1], in_order, [length + i], *root)[0] for i in range(NODES)])
    found, on_gpu = {}, on_triton(noise)
    for many, words in ((1, "a {}"), (MANY, f"{MANY} {{}}s"))[: 1 + on_gpu]:
        committed, after = [length] * many, f"after {length} committed keys"
        found[f"in {words.format('tree')} {after}"] = attend(queries, in_tree, committed, depths, ancestors)[:, ::2]
        found[f"in {words.format('chain')} {after}"] = attend(q, in_order, committed, *chain, is_chain=True)
    times = MANY // NODES if on_gpu else 1
    batch = attend(q, in_order, [length + i for i in range(NODES)] * times, *root)
    found[f"in a batch of {len(batch)}"] = batch.view(times, NODES, hq, dim)
    if on_gpu:
        prompt = build_prefill_index(table, [length], [NODES], hk, device)
        found["in a prompt"] = prompt.attend(q, in_order, options)[None]
    return alone, found


def _random(which, *shape, decoder):
    """The same normal numbers for one `which` on one device, in the decoder's dtype."""
    generator = torch.Generator(decoder.device).manual_seed(which)
    return torch.randn(shape, generator=generator, dtype=decoder.dtype, device=decoder.device)


def _differ(a, b):
    """Which numbers differ. Zeros of both signs are equal, as everywhere in the engine, and so are two NaNs."""
    return (a != b) & ~(a.isnan() & b.isnan())
