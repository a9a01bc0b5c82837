"""The target as its own module of transformers, exact: any decoder-only model whose attention can be plugged in.

    decoder = ModuleDecoder(module, max_positions=4096)        # an AutoModelForCausalLM, used in place

The module runs as it is, over the rows of all requests side by side. While it runs its attention is ours, over the paged cache, and
every operation that adds up a row runs on an op that adds it in one order (row_ops.py). What our kernels do in one is one kernel
(fused_ops.py): products of the same rows, additions with the norms after them, gated MLPs, from a product to the cache. What cannot
be replaced is refused by name before long work, on a copy without weights (module_trial.py). Several ranks divide the features of
large products (divided_products.py).

Letters: B requests, N nodes per request, M = B N rows, H hidden, V vocabulary, D head dimension, HQ and HK query and key heads.
"""

import copy
from dataclasses import replace

import torch
from torch import nn

from ....kernels.attention.rotary_kv_write import kv_rows_of_heads
from ....kernels.attention.tree_attention import PAGE
from ....kernels.jit import on_device
from ....kernels.linear.experts import tile_of_pairs
from ....kernels.row_digest import add_digest
from ..architectures import ARCHITECTURES, UnsupportedArchitecture
from ..decoder import new_digest, row_counts
from ..divided_weight import DividedWeight
from ..division import WHOLE
from .attention_plug import attending
from .deferred import Product, computed, is_source, is_whole
from .expert_modules import expert_weights
from .fixed_rope import fixed_ropes
from .module_lock import lock_of, one_at_a_time
from .module_outline import hook_changes, hooked, outline_of
from .module_source import load_module, random_module
from .module_trial import trial
from .norm_modules import norm_changes, norms_of
from .packed_heads import packed_heads, rows_of_heads
from .product_groups import pack_products
from .row_ops import RowOps


def lay_out_products(module):
    """Lay weights [.., K, N] out as the transpose of [.., N, K], which products read, in place of the original."""
    from transformers.pytorch_utils import Conv1D

    for part in module.modules():
        weights = [part.weight] if isinstance(part, Conv1D) else expert_weights(part)
        for weight in weights if getattr(part, "is_transposed", True) else ():
            weight.data = weight.data.mT.contiguous().mT


def layers_of(module, attention_modules):
    """The decoder layers, in order: the entries of the ModuleList that hold one attention module each. None if there is none."""
    for found in module.modules():
        if isinstance(found, nn.ModuleList) and len(found) == len(attention_modules):
            inside = [set(map(id, layer.modules())) for layer in found]
            if all(id(attention) in ids for attention, ids in zip(attention_modules, inside)):
                return list(found)
    return None


def _divided(group):
    """This rank's part of a ProductGroup's weight, or of one alone; None if it is held whole."""
    weight = group if isinstance(group, DividedWeight) else group.w
    return weight.w if isinstance(weight, DividedWeight) else None


class _Given(nn.Module):
    """Stands in for the base model, and for any part of it that is called in its place: its output is what it is given."""

    def __init__(self, base):
        super().__init__()
        self.parts, self.hidden = set(base._modules), None

    def __getattr__(self, name):
        return self if name in self.__dict__["parts"] else super().__getattr__(name)

    def forward(self, *args, **kwargs):
        return _Outputs((self.hidden,))


class _Outputs(tuple):
    """The outputs of a base model: hidden states, and nothing else whatever it is asked for."""

    @property
    def last_hidden_state(self):
        return self[0]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ModuleDecoder:
    """See the module.

    module: a *ForCausalLM on its device; max_positions: positions that a row may have; division: a FeatureDivision, which takes the
    module to `device` in parts. WHOLE: it stays as it is
    """

    is_packed, cut = False, None

    def __init__(self, module, max_positions, division=WHOLE, device=None):
        self.module, self.max_positions = module.eval().requires_grad_(False), max_positions
        self.division, self.ranks = division, division.ranks
        lay_out_products(module)
        with lock_of(module):  # nobody runs it while it is copied
            shape, norms = outline_of(module), norms_of(module)
        groups = trial(shape, max_positions, norms).groups
        if self.is_whole:
            self._packed = pack_products(module, groups)
            found = trial(shape, max_positions, norms, pack_products(shape, groups))
        else:
            seen = trial(shape, max_positions, norms, pack_products(shape, groups))
            self._packed = division.divide(module, groups, seen, device)
            # Once more without the weights that ranks divide: nothing but products may look at them.
            found = trial(shape, max_positions, norms, division.divide(shape, groups, seen, torch.device("meta")))
        self._products, self._mixtures, self._fused = found.products, found.mixtures, found.fused
        self._fixed = [*fixed_ropes(module, max_positions), *norm_changes(module, norms)]
        self._hooked = [module.get_submodule(name) for name in hooked(module)]
        names = {id(part): name for name, part in shape.named_modules()}
        attention = [module.get_submodule(names[id(part)]) for part, _ in found.layers]
        self._place = {id(part): (i, layer) for i, (part, layer) in enumerate(zip(attention, found.attention))}
        self.layers = layers_of(module, attention)
        if self.layers is None:
            raise UnsupportedArchitecture(
                f"the engine cannot run {module.config.model_type} models as they are: their layers were not found"
            )
        self.attention = found.attention
        first = self.attention[0]
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.embedding = module.get_input_embeddings().weight
        lm_head = module.get_output_embeddings().weight
        divided = self._packed.get(id(lm_head))
        self.vocab_size, self.hidden_size = (divided or lm_head).shape
        self.lm_head = self.output_weight = divided.w if divided else lm_head
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.base = module.get_submodule(module.base_model_prefix)
        # The same module with its base model replaced: what comes after it, soft caps and scaling included.
        self._given = _Given(self.base)
        self._output = copy.copy(module)
        self._output._modules = dict(module._modules) | {module.base_model_prefix: self._given}
        self.digest = new_digest(self.ranks, self.device)
        limit = getattr(module.config, "max_position_embeddings", None)
        rope = getattr(module.config, "rope_parameters", None)
        # A learned table ends. Nodes beyond it are never committed.
        self.last_position = None if rope or limit is None else limit - 1

    @property
    def is_whole(self):
        """Whether it is that of a single device."""
        return self.division is WHOLE

    def whole_embedding(self):
        """The embedding [V, H]."""
        return self.embedding

    def whole_lm_head(self):
        """lm_head [V, H] of all ranks, for a head that takes it. All ranks call this together."""
        held = self.module.get_output_embeddings().weight
        if len(held):
            return held
        with on_device(self.device):
            self.ranks.begin()
            return self.division.joined_rows(self.lm_head, self.vocab_size)

    @property
    def _changes(self):
        """What is set on the module while it runs. Its hooks may come and go."""
        return [*self._fixed, *hook_changes(self._hooked)]

    @property
    def kv_shape(self):
        """(layers, key heads, head dimension, dtype) of its cache."""
        return len(self.attention), self.num_kv_heads, self.head_dim, self.dtype

    @property
    def weight_bytes(self):
        """Bytes of the weights that every pass reads: all but the embedding, and lm_head."""
        parts = [part for part in self.module.parameters() if part is not self.embedding]
        if self.lm_head is self.embedding:
            parts.append(self.lm_head)
        divided = {id(w): w for group in self._packed.values() if (w := _divided(group)) is not None}
        parts += [w for w in divided.values() if w.dim() == 2]  # those of experts are parameters
        return sum(part.nbytes for part in parts)

    def read_bytes(self, rows):
        """Bytes of weights that a pass of so many rows reads, whose experts differ as far as there are enough."""
        chosen = {num: min(k * rows / num, 1) for k, num in self._mixtures}
        weights = [weight for part in self.module.modules() for weight in expert_weights(part)]
        return round(self.weight_bytes - sum(weight.nbytes * (1 - chosen[len(weight)]) for weight in weights))

    def row_counts(self, most):
        """See Decoder.row_counts."""
        counts = range(1, most + 1)
        tiles = {tuple(tile_of_pairs(rows, rows * k, e) for k, e in self._mixtures): rows for rows in counts}
        return sorted({*row_counts(self._products, most, self.device), *tiles.values()})

    @classmethod
    def from_module(cls, module, max_positions):
        """A decoder on a loaded *ForCausalLM, which it shares."""
        return cls(module, max_positions)

    @classmethod
    def from_pretrained(
        cls, folder_or_id, config, *, dtype, device, max_positions, load_format="auto", adapter=None, division=WHOLE
    ):
        """A decoder on a module of its own: see Decoder.from_pretrained."""
        device = torch.device(device)
        if adapter is not None:
            raise ValueError(
                f"adapters are merged into {', '.join(ARCHITECTURES)} models only: merge it into the {config.model_type} model "
                "with peft (merge_and_unload), save that, and give its folder"
            )
        if load_format == "dummy":
            module = random_module(config, dtype, device, division)
        else:
            module = load_module(folder_or_id, config, dtype, device, division)
        return cls(module, max_positions, division, device)

    @one_at_a_time
    def forward(self, batch, kv, streams=()):
        """Hidden states of all rows after the final norm, and the drafter's feature: see Decoder.forward."""
        positions = batch.positions.long()
        if self.last_position is not None:
            positions = positions.clamp(max=self.last_position)
        self.ranks.begin()
        entering, shared, ops = {}, {}, RowOps(self._packed)

        def attend(module, query, key, value, mask, options):
            i, layer = self._place[id(module)]
            heads = packed_heads(ops, query, key, value) if layer.is_packed else None
            if heads is None:
                q = self._write(query, key, value, kv[i], batch.cache_rows, shared)
            else:
                q = heads.write(batch.cache_rows, kv[i], batch.shared)
            found, sinks = layer.options, options.get("s_aux")
            if sinks is not None:
                found = replace(found, sinks=sinks.flatten())
            return batch.attention.attend(q, kv[i], found)[None].to(query.dtype)

        hooks = [self._hook(i, entering) for i in set(streams)]
        try:
            with torch.inference_mode(), attending(self.module, attend, self._changes):
                with ops:
                    found = self.base(
                        input_ids=batch.tokens.long()[None], position_ids=positions[None], use_cache=False
                    )
                hidden, entering = computed((found.last_hidden_state, entering))
        finally:
            for hook in hooks:
                hook.remove()
        if ops.fused != self._fused:
            raise RuntimeError(
                f"this pass fused {dict(ops.fused)}, and the trial {dict(self._fused)}: the outputs' bits would not be those of "
                "other passes. If the module has been given other weights, make a new LLM of it"
            )
        hidden = hidden[0]
        if self.digest is not None:
            add_digest(self.digest, hidden, batch.cache_rows, PAGE)
        return hidden, torch.cat([entering[i] for i in streams], 1) if streams else hidden

    def _write(self, query, key, value, layer_kv, cache_rows, shared):
        """Heads of any making: keys and values go into the cache.  -> q [M, HQ, D]"""
        if "places" not in shared:
            shared["places"] = kv_rows_of_heads(cache_rows, self.num_kv_heads, layer_kv.shape[1])
        rows = torch.cat((rows_of_heads(key), rows_of_heads(value)))  # [2 M, HK, D]
        rows = rows.reshape(-1, self.head_dim).to(layer_kv.dtype)
        layer_kv.view(-1, self.head_dim).index_copy_(0, shared["places"], rows)
        return rows_of_heads(query).contiguous()

    def _hook(self, i, entering):
        """Keep the residual stream that enters layer i; after the last one, what leaves it."""

        def enters(module, args, kwargs):
            entering[i] = (args[0] if args else kwargs["hidden_states"])[0]

        def leaves(module, args, output):
            entering[i] = (output if torch.is_tensor(output) else output[0])[0]

        if i < len(self.layers):
            return self.layers[i].register_forward_pre_hook(enters, with_kwargs=True)
        return self.layers[-1].register_forward_hook(leaves)

    def logits(self, hidden, out=None):
        """What the module makes of hidden states [M, H] -> [M, V]: see Decoder.logits."""
        return self._scores(self._after_base, hidden, out)

    def products(self, hidden):
        """As Decoder.products."""
        return self._scores(self.module.get_output_embeddings(), hidden)

    def _after_base(self, hidden):
        """hidden [1, M, H] -> logits [1, M, V]"""
        self._given.hidden = hidden
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        logits = self._output(input_ids=tokens, use_cache=False).logits
        self._given.hidden = None
        return logits

    @one_at_a_time
    def _scores(self, run, hidden, out=None):
        self.ranks.begin()
        with torch.inference_mode():
            with RowOps(self._packed):
                logits = run(hidden[None])[0]
            if out is None:
                logits = computed(logits)
            elif is_source(logits, Product) and is_whole(logits):
                return logits.source.write(out)
            else:
                return out.copy_(computed(logits))
        return logits if logits.is_cuda or logits.dtype == torch.float64 else logits.float()
