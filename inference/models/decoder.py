"""The target model as the engine runs it: a Llama-family decoder on our kernels, over the paged cache, for draft trees.

    how = dict(dtype=torch.bfloat16, device="cuda", max_positions=4096)
    decoder = Decoder.from_pretrained(folder_or_id, config, **how)     # with its own weights
    decoder = Decoder.from_module(module, max_positions=4096)          # with the module's weights

All requests' rows lie side by side, and row r is the same bits whatever the other rows are. Partial sums of a split product go
straight into the next op. Its layers are made of blocks.py; architectures.py says what differs between model types. Rope types and
limits: see check_packed. Several ranks divide one (division.py). Not yet: quantised weights, partial rotation, mixtures of experts.

Letters: B requests, N nodes per request, M = B N rows, H hidden, V vocabulary, D head dimension.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...kernels.attention.attention_fold import MAX_DIM, MAX_GROUP, AttentionOptions
from ...kernels.attention.tree_attention import PAGE
from ...kernels.linear.linear_prefill import num_multiprocessors
from ...kernels.linear.linear_table import launch_of_rows
from ...kernels.row_digest import add_digest
from ...kernels.shared_memory import shared_memory
from .architectures import ARCHITECTURES, UnsupportedArchitecture, architecture_of
from .blocks import Layer, Norm, Rotary, lm_head_logits
from .division import WHOLE, RowParallel
from .weights import head_dim_of, load_weights, random_weights, weights_of_module

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class ForwardPass:
    """Inputs of one pass over M rows."""

    tokens: torch.Tensor  # [M]
    positions: torch.Tensor  # [M]
    cache_rows: torch.Tensor  # [M] page * 64 + offset of each row's own token
    attention: (
        object  # the index of kernels/attention/tree_attention.py or prefill_attention.py: what its `attend` looks at
    )
    shared: dict = field(default_factory=dict)  # what the CPU's first layer computed for all (rotary_kv_write)


class Unfinished(NamedTuple):
    """Rows before the last layer's out product and MLP: `Decoder.finish` goes on from here."""

    heads: torch.Tensor  # [M, HQ D]
    residual: torch.Tensor  # [M, H]

    def of(self, rows):
        """Some of the rows: an index of the first dimension."""
        return Unfinished(self.heads[rows], self.residual[rows])


@torch.inference_mode(False)  # so that any pass may add to it, whatever the mode of its thread
def new_digest(ranks, device):
    """Where a decoder adds up the bits of the hidden states that it computes for requests: int64 [1]; None where there is one rank.

    The sum is the same on all ranks (lockstep.py). Rows on page 0 are padding, and left out: they may differ.
    """
    return torch.zeros(1, dtype=torch.int64, device=device) if ranks.size > 1 else None


def check_packed(config):
    """Raise UnsupportedArchitecture if this decoder cannot run a target with this Hugging Face config."""

    def refuse(what):
        raise UnsupportedArchitecture(
            f"the engine does not run {what} yet. It runs model types {', '.join(ARCHITECTURES)} with full or sliding-window "
            f"attention, rope types {', '.join(STATIC_ROPE)}, up to {MAX_GROUP} query heads per key head and even head "
            f"dimensions up to {MAX_DIM}, unquantised."
        )

    if config.model_type not in ARCHITECTURES:
        refuse(f"model type {config.model_type!r}")
    if config.hidden_act not in ("silu", "swish"):
        refuse(f"activation {config.hidden_act!r}")
    for kind in architecture_of(config).unknown_layer_types(config):
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


def position_limit(config):
    """The most positions of a target with this Hugging Face config: of rope scaled by a factor, the length it was scaled to.

    Linear scaling multiplies max_position_embeddings, and YaRN the original length, if the product is not already there. llama3 and
    longrope configs give the scaled length, and so do configs with a rope for each type of layer.
    """
    limit, rope = config.max_position_embeddings, getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return limit
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(limit, int((original or limit) * (rope.get("factor") or 1.0)))


def rotary_frequencies(config):
    """Angle per position of every pair, with the config's rope scaling.  -> [D/2] on the CPU, factor of cos and sin"""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind == "default":
        dim = head_dim_of(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, device="cpu")


def row_counts(shapes, most, device, shared=()):
    """Numbers of rows up to `most`, `most` among them, that take every launch of products for up to so many rows.

    shapes: (N, K), or (N, K, ranges of K); shared: of products whose rows the ranks share, (N, K, function of a number of rows ->
    how many each rank's share has, in their order, or None)
    """
    found, gpu = {}, (num_multiprocessors(device), shared_memory(device))
    for rows in range(1, most + 1):
        launches = [launch_of_rows(*shape[:2], rows, *gpu, *shape[2:]) for shape in shapes]
        # The place of a launch among the shares counts, for each rank runs the later ones as another kernel.
        for N, K, shares in shared:
            launches += [count and launch_of_rows(N, K, count, *gpu, 1) for count in shares(rows) or ()]
        found[tuple(launches)] = rows
    return sorted({*found.values(), most})


class Decoder:
    """The target on our kernels.

    weights: DecoderWeights; config: the Hugging Face config they belong to; max_positions: length P of the rotary table; division:
    which part of the decoder the weights are. Raises UnsupportedArchitecture for a config that does not run.
    """

    is_packed = True

    def __init__(self, weights, config, max_positions, division=WHOLE):
        check_packed(config)
        self.max_positions, self.division, self.ranks = max_positions, division, division.ranks
        architecture, eps = architecture_of(config), config.rms_norm_eps
        self.embedding, self.lm_head = weights.embedding, weights.lm_head
        # lm_head as `linear` reads it fastest, for it alone
        self.output_weight = self.lm_head if weights.packed_lm_head is None else weights.packed_lm_head
        self.embedding_multiplier = architecture.embedding_multiplier
        self.logits_divisor = architecture.logits_divisor
        self.vocab_size, self.hidden_size = division.vocab_size(config, self.lm_head), self.lm_head.shape[1]
        self.num_heads, self.num_kv_heads = division.heads(config)
        self.head_dim = head_dim_of(config)
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.rotary = Rotary.from_frequencies(
            *rotary_frequencies(config), num_positions=max_positions, dtype=self.dtype, device=self.device
        )
        self.layers = [
            Layer.from_weights(
                layer,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                rotary=self.rotary,
                eps=eps,
                options=AttentionOptions(
                    scale=architecture.attention_scale,
                    # A window longer than all positions has no effect.
                    window=None if window is None or window >= max_positions else window,
                ),
                residual_multiplier=architecture.residual_multiplier,
            )
            for layer, window in zip(weights.layers, architecture.windows(config))
        ]
        self.norm = Norm(weights.norm, eps, architecture.residual_multiplier, weights.layers[-1].down.in_pairs)
        self.digest = new_digest(self.ranks, self.device)

    @property
    def is_whole(self):
        """Whether it is that of a single device."""
        return self.division is WHOLE

    @property
    def cut(self):
        """How sums are cut other than on a single device, as plain data; None: they are not."""
        return self.division.cut

    @property
    def kv_shape(self):
        """(layers, key heads, head dimension, dtype) of its cache."""
        return len(self.layers), self.num_kv_heads, self.head_dim, self.dtype

    @property
    def weight_bytes(self):
        """Bytes of the weights that every pass reads: those of the products, lm_head's included."""
        products = [product for layer in self.layers for product in self._products(layer)]
        return sum(product.nbytes for product in products) + self.lm_head.nbytes

    def _products(self, layer):
        return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down

    def row_counts(self, most):
        """Numbers of rows up to `most`, `most` among them, that take every launch that the products have for up to so many rows."""
        products = self._products(self.layers[0])
        shapes = [(*product.shape, product.splits) for product in products]
        shapes.append((*self.lm_head.shape, self.division.logits_splits))
        shared = [(*product.shape, product.shares) for product in products if isinstance(product, RowParallel)]
        return row_counts(shapes, most, self.device, shared)

    @classmethod
    def from_module(cls, module, max_positions):
        """A decoder on a loaded *ForCausalLM. The module's weights become views of the packed ones: both share one copy."""
        check_packed(module.config)
        return cls(weights_of_module(module), module.config, max_positions)

    @classmethod
    def from_pretrained(
        cls, folder_or_id, config, *, dtype, device, max_positions, load_format="auto", adapter=None, division=WHOLE
    ):
        """A decoder with its own weights: read from safetensors tensor by tensor onto the device, or random ones.

        config: the model's Hugging Face config; dtype: torch.dtype of the weights, whatever the files hold; load_format: "auto"
        or "dummy" (random weights of the config's shape; folder_or_id is not looked at); adapter: an Adapter to add to the
        weights (not to random ones), or None; division: which part of them is held. Raises ValueError, naming files and tensors,
        before anything is read: see weights.load_weights.
        """
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
        check_packed(config)
        if load_format == "dummy":
            weights = random_weights(config, dtype, device, division=division)
        else:
            weights = load_weights(folder_or_id, config, dtype, device, adapter=adapter, division=division)
        return cls(weights.packed(), config, max_positions, division)

    def forward(self, batch, kv, streams=()):
        """Hidden states of all rows after the final norm, and the drafter's feature; writes keys and values into the cache.

        batch: a ForwardPass of M rows; kv [layers, 2, rows, D]; streams: layers whose input's residual stream is the drafter's
        feature, ascending (the number of layers: after the last one), side by side  ->  hidden [M, H], feature [M, A H]; without
        streams the feature is the hidden state
        """
        unfinished, entering = self._until_last_heads(batch, kv)
        x, residual = self._finish(unfinished)
        entering.append(residual)
        if self.digest is not None:
            add_digest(self.digest, x, batch.cache_rows, PAGE)
        return x, torch.cat([entering[i] for i in streams], 1) if streams else x

    def forward_some(self, batch, kv, streams, rows):
        """As `forward`, but only some rows go through the last layer's out product and MLP.  rows [R]

        ->  hidden [R, H], feature [M, A H] (without streams: [R, H]), Unfinished of all M. `streams` must not name the one
        after the last layer.
        """
        unfinished, entering = self._until_last_heads(batch, kv)
        x, _ = self._finish(unfinished.of(rows))
        return x, torch.cat([entering[i] for i in streams], 1) if streams else x, unfinished

    def finish(self, unfinished):
        """The hidden states of rows that `forward_some` left.  Unfinished of M rows  ->  [M, H]"""
        return self._finish(unfinished)[0]

    def new_unfinished(self, rows):
        """Room for Unfinished of so many rows."""
        heads = self.num_heads * self.head_dim
        return Unfinished(
            *(torch.zeros(rows, n, dtype=self.dtype, device=self.device) for n in (heads, self.hidden_size))
        )

    def _until_last_heads(self, batch, kv):
        """-> Unfinished, and the residual streams [M, H] that enter the layers"""
        residual = self.division.embedded(batch.tokens, self.embedding, self.embedding_multiplier)  # [M, H]
        parts = None  # [S, M, H] what the previous layer adds to the residual
        entering, last = [], len(self.layers) - 1
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv)):
            x, residual = layer.input_norm(residual, parts)
            entering.append(residual)
            heads = layer.attention.heads(x, batch, layer_kv)
            if i < last:
                parts, residual = layer.after_heads(heads, residual)
        return Unfinished(heads, residual), entering

    def _finish(self, unfinished):
        """-> hidden [M, H], the residual stream [M, H] after the last layer"""
        parts, residual = self.layers[-1].after_heads(*unfinished)
        return self.norm(residual, parts)

    def logits(self, hidden, out=None):
        """lm_head over hidden states [M, H] -> [M, V]: on a GPU in the model's dtype (in `out` if given), else fp32 at least."""
        return self._by_lm_head(hidden, self.logits_divisor, out)

    def products(self, hidden):
        """As `logits`, but what lm_head gives, before a target scales or caps its logits."""
        return self._by_lm_head(hidden, 1.0)

    def _by_lm_head(self, hidden, divisor, out=None):
        how = divisor, out if self.is_whole else None, self.division.logits_splits
        return self.division.joined_logits(lm_head_logits(hidden, self.output_weight, *how), out)

    def whole_embedding(self):
        """The embedding [V, H] of all ranks, for a head that takes it. All ranks call this together."""
        return self.division.joined(self.embedding)

    def whole_lm_head(self):
        """lm_head [V, H] of all ranks, for a head that takes it. All ranks call this together."""
        return self.division.joined(self.lm_head)
