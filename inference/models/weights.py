"""A decoder's weights in the engine's layout: from a loaded module, from safetensors, or random.

The engine packs q, k, v into one product and gate, up into another. `tensor_plan` lists the tensors of a Hugging Face checkpoint
that make up each packed one; everything else follows from it. A checkpoint is read tensor by tensor straight into the packed
weights on the device: beside the weights at most CHUNK_BYTES are held, on the host or on the device. Names, shapes, dtypes and the
length of every file are compared with the plan before anything is allocated.

A rank of a tensor-parallel group reads its own part (division.py).

Does not know: other layouts than Hugging Face's, .bin and .pt files, quantised tensors.

Letters: H hidden, I intermediate, V vocabulary, HQ and HK query and key heads, D head dimension.
"""

import math
import sys
import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn
from tqdm import tqdm

from ...heads.storage.user_errors import list_names
from ...kernels.linear.linear import pack_weight
from .architectures import UnsupportedArchitecture, architecture_of
from .blocks import LayerWeights, Linear
from .checkpoint_files import find_files, open_file, read_header
from .division import WHOLE
from .memory import check_memory

# The dtypes that a weight may have in a file; any other means quantisation.
FILE_DTYPES = ("F64", "F32", "F16", "BF16")
# Bytes that are copied, and cast, at once.
CHUNK_BYTES = 64 * 2**20
# From this size on, loading shows a progress bar on a terminal.
LARGE_BYTES = 2**30


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder, on one device and of one dtype. With tied embeddings, lm_head is the embedding itself."""

    embedding: torch.Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [V, H]
    packed_lm_head: torch.Tensor | None = None  # pack_weight(lm_head)

    def packed(self):
        """The same with products in the layout that the device reads fastest (pack_weight), for weights that never change."""
        names = ("qkv", "out", "gate_up", "down")
        for i, layer in enumerate(
            self.layers
        ):  # one layer at a time: the memory of its old weights serves the next one
            self.layers[i] = replace(layer, **{name: getattr(layer, name).packed() for name in names})
        return replace(self, packed_lm_head=pack_weight(self.lm_head))


# --- from a loaded module ---


def weights_of_module(module):
    """DecoderWeights of a loaded *ForCausalLM. The module's packed weights become views, so both share one copy.

    Raises UnsupportedArchitecture for layers that are no plain Linear, and for a module spread over devices or dtypes.
    """
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for one in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            check_plain_linear(one)
        for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            check_plain_linear(one)
    check_plain_linear(module.lm_head)
    if module.lm_head.bias is not None:
        raise UnsupportedArchitecture("the engine does not run an lm_head with a bias yet")
    kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in module.parameters()})
    if len(kinds) > 1:
        raise UnsupportedArchitecture(
            f"the engine does not run a module spread over {', '.join(kinds)} yet: load it in one dtype on one device"
        )
    head_norms = architecture_of(module.config).head_norms
    with torch.no_grad():
        return DecoderWeights(
            embedding=module.model.embed_tokens.weight.data,
            layers=[
                weights_of_layer(
                    layer,
                    input_norm=layer.input_layernorm.weight.data,
                    q_norm=layer.self_attn.q_norm.weight.data if head_norms else None,
                    k_norm=layer.self_attn.k_norm.weight.data if head_norms else None,
                )
                for layer in module.model.layers
            ],
            norm=module.model.norm.weight.data,
            lm_head=module.lm_head.weight.data,
        )


def weights_of_layer(layer, **norms):
    """LayerWeights of a decoder layer's module. The module's product weights become views of packed weights.

    norms: its norms beside post_norm, by the names of LayerWeights.
    """
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        qkv=pack_rows([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=pack_rows([attention.o_proj]),
        gate_up=pack_rows([mlp.gate_proj, mlp.up_proj]),
        down=pack_rows([mlp.down_proj]),
        post_norm=layer.post_attention_layernorm.weight.data,
        **norms,
    )


def check_plain_linear(layer):
    """Raise UnsupportedArchitecture for anything but a plain Linear: an adapter or a quantised layer computes something else."""
    if type(layer) is not nn.Linear:
        raise UnsupportedArchitecture(
            f"the engine does not run layers of type {type(layer).__module__}.{type(layer).__name__} yet, only plain Linear "
            "ones: merge adapters into the weights first (merge_and_unload), and load without quantisation"
        )


def pack_rows(linears):
    """One Linear [sum of N, K] for several modules, whose weights and biases become views of it.

    A single module, and modules packed before (by an earlier engine on the same module), are used in place, not copied.
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
    return Linear(pack([layer.weight for layer in linears]), None if biases[0] is None else pack(biases))


# --- what a checkpoint holds ---


def head_dim_of(config):
    """D of a Hugging Face config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def tensor_plan(config):
    """{packed tensor: {tensor of the checkpoint: shape}}, in the order of loading; parts are stacked along dimension 0.

    With tied embeddings there is no "lm_head".
    """
    hidden, vocab, dim = config.hidden_size, config.vocab_size, head_dim_of(config)
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    inner = config.intermediate_size
    architecture = architecture_of(config)
    plan = {"embedding": {"model.embed_tokens.weight": (vocab, hidden)}}
    for i in range(config.num_hidden_layers):

        def add(packed, parts, width=None, bias=False, i=i):
            place = f"model.layers.{i}."
            if width is None:
                plan[f"layers.{i}.{packed}"] = {f"{place}{name}.weight": (rows,) for name, rows in parts.items()}
                return
            plan[f"layers.{i}.{packed}.weight"] = {f"{place}{name}.weight": (n, width) for name, n in parts.items()}
            if bias:
                plan[f"layers.{i}.{packed}.bias"] = {f"{place}{name}.bias": (rows,) for name, rows in parts.items()}

        add("input_norm", {"input_layernorm": hidden})
        projections = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        add("qkv", projections, width=hidden, bias=architecture.attention_bias)
        if architecture.head_norms:
            add("q_norm", {"self_attn.q_norm": dim})
            add("k_norm", {"self_attn.k_norm": dim})
        add("out", {"self_attn.o_proj": hidden}, width=q, bias=architecture.out_bias)
        add("post_norm", {"post_attention_layernorm": hidden})
        add("gate_up", {"mlp.gate_proj": inner, "mlp.up_proj": inner}, width=hidden, bias=architecture.mlp_bias)
        add("down", {"mlp.down_proj": hidden}, width=inner, bias=architecture.mlp_bias)
    plan["norm"] = {"model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        plan["lm_head"] = {"lm_head.weight": (vocab, hidden)}
    return plan


def weight_bytes(config, dtype, division=WHOLE):
    """Bytes of all weights in `dtype`, as far as the division holds them."""
    held = 0
    for packed, parts in tensor_plan(config).items():
        rows = sum(division.num_rows(packed, name, count) for name, (count, *_) in parts.items())
        width = math.prod(next(iter(parts.values()))[1:])
        held += rows * sum(len(range(width)[columns]) for columns in division.columns_of(packed))
    return dtype.itemsize * held


def _allocate(parts, dtype, device):
    """The packed tensor for `parts`, uninitialised."""
    shapes = list(parts.values())
    return torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)


def _assemble(config, tensors, division):
    """DecoderWeights from {packed name: the tensors of its ranges of columns, one but for products that are divided along K}."""
    ranges = {name: pieces for name, pieces in tensors.items() if name.endswith(".weight")}
    tensors = {name: pieces[0] for name, pieces in tensors.items()}

    def product(name):
        return division.product(name, ranges[f"{name}.weight"], tensors.get(f"{name}.bias"))

    layers = []
    for at in (f"layers.{i}" for i in range(config.num_hidden_layers)):
        products = {name: product(f"{at}.{name}") for name in ("qkv", "out", "gate_up", "down")}
        norms = {name: tensors.get(f"{at}.{name}") for name in ("input_norm", "post_norm", "q_norm", "k_norm")}
        layers.append(LayerWeights(**products, **norms))
    embedding = tensors["embedding"]
    return DecoderWeights(embedding, layers, tensors["norm"], tensors.get("lm_head", embedding))


# --- random weights ---


def random_weights(config, dtype, device, seed=0, division=WHOLE):
    """DecoderWeights of the config's shape, the same for the same seed and device, without reading anything.

    Every rank makes all of them, one after the other, and keeps its part of each.

    Weights are normal with deviation K^-1/2 over their K inputs (0.016 for 4096), so that activations keep their size at any
    width; norms are one, biases normal with deviation 0.02.
    """
    device = torch.device(device)
    check_memory(weight_bytes(config, dtype, division), dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, parts in tensor_plan(config).items():
        division.ranks.check()
        tensor = _allocate(parts, dtype, device)
        if tensor.dim() == 2:
            tensor.normal_(std=tensor.shape[1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            tensor.normal_(std=0.02, generator=generator)
        else:
            tensor.fill_(1)
        tensors[name] = division.take(name, parts, tensor)
    return _assemble(config, tensors, division)


# --- from safetensors ---


def load_weights(folder_or_id, config, dtype, device, *, adapter=None, division=WHOLE):
    """DecoderWeights from a folder or a Hub id with model.safetensors, or with an index and its shards.

    config: the model's Hugging Face config; dtype: the dtype that tensors are cast to, one by one; device: where they go; adapter:
    an Adapter that is added to them on the way, in fp32, or None; division: what is read of them (division.py).
    Raises ValueError before any tensor is read. It names files that are missing, cut short or of another kind, and tensors that are
    missing, unexpected, misshapen or quantised.
    """
    device = torch.device(device)
    files = find_files(folder_or_id, getattr(config, "_commit_hash", None))
    headers = {path: read_header(path) for path in files}
    where = {name: path for path, header in headers.items() for name in header}
    plan = tensor_plan(config)
    if config.tie_word_embeddings:
        _plan_tied(plan, where)
    _check_tensors(folder_or_id, plan, headers)
    if adapter is not None:
        adapter.check_fits({name: shape for parts in plan.values() for name, shape in parts.items()})
    check_memory(weight_bytes(config, dtype, division), dtype, device)
    opened = {path: open_file(path) for path in files}
    # A tensor of an opened file is a view of it: nothing is read, or takes memory, until it is used.
    stored = {name: opened[where[name]].get_tensor(name) for parts in plan.values() for name in parts}
    if config.tie_word_embeddings and "lm_head" in plan:
        _tie_if_equal(plan, stored, division)
    tensors, total = {}, sum(stored[name].nbytes for parts in plan.values() for name in parts) // division.ranks.size
    with _progress_bar(total, shown=division.ranks.rank == 0) as bar:
        for packed, parts in plan.items():
            division.ranks.check()
            tensors[packed] = [
                _read(packed, parts, columns, stored, division, adapter=adapter, bar=bar, dtype=dtype, device=device)
                for columns in division.columns_of(packed)
            ]
    return _assemble(config, tensors, division)


def _read(packed, parts, columns, stored, division, *, adapter, bar, dtype, device):
    """The rows of a packed tensor that the division holds, of a range of its columns."""
    width = [len(range(size)[columns]) for size in next(iter(parts.values()))[1:]]
    held = {name: (division.num_rows(packed, name, count), *width) for name, (count, *_) in parts.items()}
    target, start = _allocate(held, dtype, device), 0
    for name, (count, *_) in parts.items():
        rows, end = division.rows_of(packed, name, count), start + held[name][0]
        _copy(name, stored[name], target[start : start + len(rows)], rows, columns, adapter=adapter, bar=bar)
        target[start + len(rows) : end] = 0  # padding
        start = end
    return target


def _plan_tied(plan, where):
    """Adapt the plan to tied embeddings: files hold either name or both."""
    (embedding, shape), lm_head = *plan["embedding"].items(), "lm_head.weight"
    if lm_head in where:
        plan["lm_head" if embedding in where else "embedding"] = {lm_head: shape}


def _tie_if_equal(plan, stored, division):
    """If a file holds both names, load one of them; or both, with a warning, if they differ (as transformers does)."""
    (embedding,), (lm_head,) = plan["embedding"], plan["lm_head"]
    rows = division.rows_of("embedding", embedding, len(stored[embedding]))
    ours = [stored[name][rows.start : rows.stop] for name in (embedding, lm_head)]
    if ours[0].dtype == ours[1].dtype and torch.equal(*ours):
        del plan["lm_head"]
        return
    warnings.warn(
        f"the config ties {lm_head} to {embedding}, but the checkpoint holds different values: both are used, as they are",
        stacklevel=3,
    )


def _copy(name, source, target, rows, columns, *, adapter, bar):
    """target = rows and columns of source and what the adapter (None: nothing) adds to them, cast and moved in pieces."""
    count = rows_at_once(source)
    for first, place in zip(rows[::count], target.split(count)):
        piece = source[first : first + len(place)]
        if adapter is not None:
            piece = adapter.add_to(name, piece, first)
        piece = piece[..., columns]
        bar.update(piece.nbytes)
        # Bytes are moved to another device before they are cast: the cast is faster there and the host holds no copy.
        place.copy_(piece.to(target.device) if piece.dtype != target.dtype else piece)


def rows_at_once(tensor):
    """Number of rows of a stored tensor in a piece of at most CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // max(1, tensor[0].nbytes))


def _progress_bar(total, shown=True):
    return tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=not shown or total < LARGE_BYTES or not sys.stderr.isatty(),
    )


def _check_tensors(model, plan, headers):
    """ValueError listing every difference between the plan and what the files hold."""
    found = {name: (path, *entry) for path, header in headers.items() for name, entry in header.items()}
    wanted = {name: shape for parts in plan.values() for name, shape in parts.items()}
    # Old Llama files hold this table of the positions, which follows from the config.
    computed = "rotary_emb.inv_freq"
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not name.endswith(computed)]
    misshapen, quantised = [], []
    for name, wanted_shape in wanted.items():
        path, dtype, shape = found.get(name, (None, FILE_DTYPES[0], wanted_shape))
        if shape != wanted_shape:
            misshapen.append(f"{name} is {list(shape)} in {path.name} and {list(wanted_shape)} by config.json")
        if dtype not in FILE_DTYPES:
            quantised.append(f"{name} is {dtype}")
    problems = [
        text.format(list_names(names))
        for names, text in (
            (missing, "it lacks {}"),
            (extra, "it holds {}, which this architecture does not have"),
            (misshapen, "{}"),
            (quantised, "{}; quantised weights do not run yet, only " + ", ".join(FILE_DTYPES)),
        )
        if names
    ]
    if problems:
        raise ValueError(f"the checkpoint {model} does not fit its config: {'; '.join(problems)}")
