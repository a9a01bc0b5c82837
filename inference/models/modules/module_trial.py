"""The trial of a module: a pass on `meta`, without weights, that shows what its attention is and that all of it can be replaced.

What cannot be replaced is refused by name, before long work.

Letters: N x K a weight, E experts, k of them per row, HQ and HK query and key heads, D head dimension.
"""

import inspect
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ....kernels.attention.attention_fold import MAX_DIM, MAX_GROUP, AttentionOptions
from ..architectures import UnsupportedArchitecture
from ..layer_reach import find_reaches
from .attention_plug import attending
from .fixed_rope import fixed_ropes
from .module_outline import has_hooks
from .norm_modules import norm_changes
from .packed_heads import packed_heads
from .product_groups import ProductGroup, groups_of, is_product
from .row_ops import RowOps, UnsupportedOperation

# What attention may be told, beside the options that it follows. Anything else that is not None is refused.
IGNORED = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "is_causal",
    "cache_position",
}
# Types whose tokens differed from the library's in benchmarks/proofs/targets.py, and it is not known why.
WRONG = {"moshi"}
FOLLOWED = {"scaling", "sliding_window", "softcap", "s_aux"}


@dataclass(frozen=True)
class AttentionLayer:
    """What the trial saw of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_packed: bool  # q, k and v are one product, and go to the cache in one kernel
    options: AttentionOptions  # but for its sinks, which are the module's own at the time


class TrialOps(RowOps):
    """Where a forward was replaced by a function that holds tensors of its own, these meet the rows as if they were on `meta`."""

    def __init__(self, groups=None):
        super().__init__(groups)
        self._outlines = {}  # {id: (a tensor, its outline)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given, form = tree_flatten((args, kwargs))
        tensors = [one for one in given if torch.is_tensor(one)]
        if any(one.is_meta for one in tensors) and not all(one.is_meta for one in tensors):
            args, kwargs = tree_unflatten([self._outline(one) for one in given], form)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _outline(self, one):
        if not torch.is_tensor(one) or one.is_meta or not one.dim():  # numbers go with any device
            return one
        if id(one) not in self._outlines:
            self._outlines[id(one)] = one, torch.empty_like(one, device="meta")
        return self._outlines[id(one)][1]


@dataclass(frozen=True)
class Trial:
    """What a trial saw."""

    layers: list  # [(attention module, AttentionLayer)] in order
    products: set  # shapes [N, K]
    mixtures: set  # (k, E)
    fused: Counter  # kernels of the base model that do the work of several operations
    groups: list  # [[name of a linear]] that should be one product
    multiplied: list  # names of the parts that are products, in order
    gated: set  # of these, whose features are gates, then what they gate

    @property
    def attention(self):
        return [layer for _, layer in self.layers]


def trial(module, max_positions, norms=(), packed=None):
    """Run a module on `meta` over a few rows, and see that all of it can be replaced.  -> Trial

    norms: names of the RMSNorms that are one operation (norm_modules.py); packed: {id of a weight: ProductGroup}
    Raises UnsupportedArchitecture, saying what cannot.
    """
    config, rows, seen = module.config.get_text_config(), 5, []

    def refuse(what):
        raise UnsupportedArchitecture(f"the engine cannot run {config.model_type} models as they are: {what}")

    try:
        reaches = find_reaches(config)
    except ValueError as error:
        refuse(str(error))
    kinds = None if None in reaches else config.layer_types
    if chunks := [reach for reach in reaches.values() if reach.within(max_positions).chunk]:
        refuse(f"its layers see {chunks[0]}")

    def attend(layer, query, key, value, mask, options):
        if kinds and len(seen) == len(kinds):
            refuse(f"it has more than the {len(kinds)} layers of its config")
        unknown = [name for name, given in options.items() if given is not None and name not in IGNORED | FOLLOWED]
        if mask is not None:
            refuse("its attention takes a mask of its own")
        if unknown:
            refuse(f"its attention takes {', '.join(unknown)}")
        if key.shape != value.shape:
            refuse(f"its keys {list(key.shape)} and values {list(value.shape)} differ in shape")
        if query.shape[2] != rows or key.shape[2] != rows:
            refuse("its attention sees other rows than were put in")
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        if dim > MAX_DIM or heads % kv_heads or heads > MAX_GROUP * kv_heads:
            refuse(f"{heads} query heads on {kv_heads} key heads of {dim} dimensions")
        if not getattr(layer, "is_causal", True):
            refuse("its attention sees later tokens")
        reach = reaches[kinds[len(seen)] if kinds else None]
        if options.get("sliding_window") not in (None, reach.window):
            refuse(f"its layer {len(seen)} has a window of {options['sliding_window']}, and its config says {reach}")
        sinks = options.get("s_aux")
        if sinks is not None and sinks.numel() != heads:
            refuse(f"its {heads} heads have sinks {list(sinks.shape)}")
        given = AttentionOptions(options.get("scaling"), reach.within(max_positions).window, options.get("softcap"))
        is_packed = packed_heads(ops, query, key, value) is not None
        seen.append((layer, AttentionLayer(heads, kv_heads, dim, is_packed, given)))
        return query.transpose(1, 2)

    check_positions(module, refuse)
    changes = [*fixed_ropes(module, max_positions), *norm_changes(module, norms)]
    fused, ops = Counter(), TrialOps(packed)
    hook = module.get_output_embeddings().register_forward_pre_hook(lambda *_: fused.update(ops.fused))
    tokens = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), attending(module, attend, changes), ops:
            module(input_ids=tokens, position_ids=tokens, use_cache=False)
    except UnsupportedOperation as error:
        own = "two batches" in str(error) and not module._supports_attention_backend  # queries times keys
        refuse(f"its attention is not taken from transformers' interface: {error}" if own else str(error))
    except (KeyError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        refuse(f"its attention cannot be plugged in ({type(error).__name__}: {str(error).strip()[:120]})")
    finally:
        hook.remove()
    modules = [layer for layer, _ in seen]
    if not seen or len(set(map(id, modules))) != len(modules):
        refuse(f"attention was called {len(seen)} times by {len(set(map(id, modules)))} modules")
    if len({(one.num_kv_heads, one.head_dim) for _, one in seen}) != 1:
        refuse("its layers have caches of different shapes")
    groups = groups_of(module, ops.calls, ops.wishes)
    return Trial(seen, ops.products, ops.mixtures, fused, groups, *_multiplied(module, ops))


def _multiplied(module, ops):
    """Names of the parts that are products, and of those whose features are gates, then what they gate."""
    names = {id(part.weight): name for name, part in module.named_modules() if is_product(part) and not has_hooks(part)}
    called = dict.fromkeys(names[id(w)] for _, w in ops.calls if id(w) in names)
    gated = {id(w) for w in ops.gated}
    packed = [group for group in ops.groups.values() if isinstance(group, ProductGroup)]
    gated |= {w for group in packed if id(group.w) in gated for w in group.spans}
    return list(called), {name for w, name in names.items() if w in gated}


def check_positions(module, refuse):
    """refuse(what) if a module would not take the positions that it is given as those of a text from 0 on."""
    base = module.get_submodule(module.base_model_prefix)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        refuse("its base model takes no position_ids")
    for part in module.modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            refuse("its positions begin after its token of padding")
        if isinstance(part, nn.ModuleList) and any(hasattr(layer, "encoder_attn") for layer in part):
            refuse("its layers may attend to an encoder")
    if module.config.model_type in WRONG:
        refuse("its tokens would be others than the library's")
