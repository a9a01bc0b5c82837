"""The target as its own module of transformers, exact: any decoder-only model whose attention can be plugged in.

    decoder = ModuleDecoder(module, max_positions=4096)        # an AutoModelForCausalLM, used in place

The module runs as it is, over the rows of all requests side by side. While it runs its attention is ours, over the paged cache, and
every operation that adds up a row runs on an op that adds it in one order (row_ops.py). What cannot be replaced is refused by
name before long work, on a copy without weights (`trial`).

Letters: B requests, N nodes per request, M = B N rows, H hidden, V vocabulary, D head dimension, HQ and HK query and key heads.
"""

import copy
import inspect
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ...heads.storage.hub_answer import hub_options
from ...heads.storage.remote_code import is_remote
from ...kernels.attention.attention_fold import MAX_DIM, MAX_GROUP, AttentionOptions
from ...kernels.attention.rotary_kv_write import kv_rows_of_heads
from ...kernels.linear.experts import tile_of_pairs
from .architectures import ARCHITECTURES, UnsupportedArchitecture
from .decoder import row_counts
from .expert_modules import expert_weights, register_experts
from .fixed_rope import fixed_ropes, in_force
from .layer_reach import find_reaches
from .memory import check_memory
from .row_ops import RowOps, UnsupportedOperation

NAME = "headstart"  # of our attention and our experts among transformers'
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
_running = threading.local()  # .calls: what runs in this thread, the innermost last


@dataclass(frozen=True)
class AttentionLayer:
    """What the trial saw of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions  # but for its sinks, which are the module's own at the time


def _attention(module, query, key, value, attention_mask=None, **options):
    """Our attention in the form that transformers calls.  query [1, HQ, M, D], key and value [1, HK, M, D] -> [1, M, HQ, D]"""
    with _disable_current_modes():  # it is exact by itself
        return _running.calls[-1](module, query, key, value, attention_mask, options), None


def _register():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        register_experts(NAME)


@contextmanager
def _attending(module, attend, ropes):
    """Inside this context the module's attention is `attend` and its rotary embeddings are `ropes`; afterwards what they were."""
    _register()
    config, calls = module.config, _running.__dict__.setdefault("calls", [])
    # Without a token of padding no model looks for it among the rows.
    ours = {
        "_attn_implementation": NAME,
        "_experts_implementation": NAME,
        "pad_token_id": None,
        "output_router_logits": False,
    }
    calls.append(attend)
    try:
        with in_force([(config, ours), *ropes]):
            yield
    finally:
        calls.pop()


# --- modules ---


def parameter_bytes(config, dtype):
    """Bytes of the parameters of a config's module in dtype, shared ones once."""
    return dtype.itemsize * sum(parameter.numel() for parameter in on_meta(config).parameters())


def random_module(config, dtype, device):
    """A module of a config's shape with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    check_memory(parameter_bytes(config, dtype), dtype, device)
    with device:
        own = is_remote(type(config))
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=own).eval()


# --- the trial ---


def on_meta(config):
    """The *ForCausalLM of a config, without weights. Raises UnsupportedArchitecture if transformers has none."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            own = is_remote(type(config))
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=own).eval()
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise UnsupportedArchitecture(
            f"the engine does not run model type {config.model_type!r}: transformers gives no module of it that generates text "
            f"({str(error).strip().partition(chr(10))[0][:200]})"
        ) from error


def trial(module, max_positions):
    """Run a module on `meta` over a few rows, and see that all of it can be replaced.

    -> [(attention module, AttentionLayer)] in order, shapes [N, K] of all products, (k, E) of all mixtures of experts

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
        seen.append((layer, AttentionLayer(heads, kv_heads, dim, given)))
        return query.transpose(1, 2)

    check_positions(module, refuse)
    ropes = fixed_ropes(module, max_positions)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), _attending(module, attend, ropes), RowOps(compute=False) as ops:
            module(input_ids=tokens, position_ids=tokens, use_cache=False)
    except UnsupportedOperation as error:
        own = "two batches" in str(error) and not module._supports_attention_backend  # queries times keys
        refuse(f"its attention is not taken from transformers' interface: {error}" if own else str(error))
    except (KeyError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        refuse(f"its attention cannot be plugged in ({type(error).__name__}: {str(error).strip()[:120]})")
    modules = [layer for layer, _ in seen]
    if not seen or len(set(map(id, modules))) != len(modules):
        refuse(f"attention was called {len(seen)} times by {len(set(map(id, modules)))} modules")
    if len({(one.num_kv_heads, one.head_dim) for _, one in seen}) != 1:
        refuse("its layers have caches of different shapes")
    return seen, ops.products, ops.mixtures


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


# --- the decoder ---


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
    """See the module.  module: a *ForCausalLM on its device; max_positions: positions that a row may have"""

    is_packed = False

    def __init__(self, module, max_positions):
        self.module, self.max_positions = module.eval().requires_grad_(False), max_positions
        lay_out_products(module)
        shape = on_meta(module.config)
        seen, self._products, self._mixtures = trial(shape, max_positions)
        self._ropes = fixed_ropes(module, max_positions)
        names = {id(part): name for name, part in shape.named_modules()}
        attention = [module.get_submodule(names[id(part)]) for part, _ in seen]
        self._place = {id(part): (i, layer) for i, (part, (_, layer)) in enumerate(zip(attention, seen))}
        self.layers = layers_of(module, attention)
        if self.layers is None:
            raise UnsupportedArchitecture(
                f"the engine cannot run {module.config.model_type} models as they are: their layers were not found"
            )
        self.attention = [layer for _, layer in seen]
        first = self.attention[0]
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.embedding = module.get_input_embeddings().weight
        self.lm_head = self.output_weight = module.get_output_embeddings().weight
        self.vocab_size, self.hidden_size = self.lm_head.shape
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.base = module.get_submodule(module.base_model_prefix)
        # The same module with its base model replaced: what comes after it, soft caps and scaling included.
        self._given = _Given(self.base)
        self._output = copy.copy(module)
        self._output._modules = dict(module._modules) | {module.base_model_prefix: self._given}
        limit = getattr(module.config, "max_position_embeddings", None)
        rope = getattr(module.config, "rope_parameters", None)
        # A learned table ends. Nodes beyond it are never committed.
        self.last_position = None if rope or limit is None else limit - 1

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
    def from_pretrained(cls, folder_or_id, config, *, dtype, device, max_positions, load_format="auto", adapter=None):
        """A decoder on a module of its own: see Decoder.from_pretrained."""
        from transformers import AutoModelForCausalLM

        device = torch.device(device)
        if adapter is not None:
            raise ValueError(
                f"adapters are merged into {', '.join(ARCHITECTURES)} models only: merge it into the {config.model_type} model "
                "with peft (merge_and_unload), save that, and give its folder"
            )
        if load_format == "dummy":
            module = random_module(config, dtype, device)
        else:
            check_memory(parameter_bytes(config, dtype), dtype, device)
            # Each tensor goes to a GPU as it is read.
            place = {"device_map": {"": device}} if device.type == "cuda" else {}
            place |= hub_options(folder_or_id) | {"trust_remote_code": is_remote(type(config))}
            module = AutoModelForCausalLM.from_pretrained(folder_or_id, dtype=dtype, **place)
        return cls(module, max_positions)

    def forward(self, batch, kv, streams=()):
        """Hidden states of all rows after the final norm, and the drafter's feature: see Decoder.forward."""
        positions = batch.positions.long()
        if self.last_position is not None:
            positions = positions.clamp(max=self.last_position)
        places = kv_rows_of_heads(batch.cache_rows, self.num_kv_heads, kv.shape[2])
        entering = {}

        def attend(module, query, key, value, mask, options):
            i, layer = self._place[id(module)]
            rows = torch.cat((key[0].transpose(0, 1), value[0].transpose(0, 1)))  # [2 M, HK, D]
            kv[i].view(-1, self.head_dim).index_copy_(0, places, rows.reshape(-1, self.head_dim).to(kv.dtype))
            q = query[0].transpose(0, 1).contiguous()
            found, sinks = layer.options, options.get("s_aux")
            if sinks is not None:
                found = replace(found, sinks=sinks.flatten())
            return batch.attention.attend(q, kv[i], found)[None].to(query.dtype)

        hooks = [self._hook(i, entering) for i in set(streams)]
        try:
            with torch.inference_mode(), _attending(self.module, attend, self._ropes), RowOps():
                found = self.base(input_ids=batch.tokens.long()[None], position_ids=positions[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        hidden = found.last_hidden_state[0]
        return hidden, torch.cat([entering[i] for i in streams], 1) if streams else hidden

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
        self._given.hidden = hidden[None]
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with torch.inference_mode(), RowOps():
            logits = self._output(input_ids=tokens, use_cache=False).logits[0]
        self._given.hidden = None
        if out is not None:
            return out.copy_(logits)
        return logits if logits.is_cuda or logits.dtype == torch.float64 else logits.float()
