"""The frozen target as the trainers see it: packed rows in, features out.

The feature is the last hidden state after the final norm and, for heads that ask for them, the residual streams that enter layers.
It works with any AutoModelForCausalLM whose logits are its lm_head applied to that state, and whose attention follows explicit 4D
masks and position ids. `FrozenTarget.check` tests that on real rows; docs/targets.md lists the models. Layers with a sliding window
or chunks get masks of their own (layer_masks.py). On a GPU the attention is FlexAttention with block masks if the model supports
it, else SDPA with masks.

Letters: B rows, T tokens per row, M = B T, H hidden size, V vocabulary, A residual streams asked for.
"""

import contextlib
import inspect
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...heads.packed_attention import FLEX_DTYPES, FLEX_LEAST_DIM, FLEX_OPTIONS, block_mask
from ...heads.storage.hub_answer import ask_hub, hub_options
from ...heads.storage.hub_id import near_folder
from ...heads.storage.remote_code import config_code
from ...inference.models.decoder import position_limit
from ...inference.models.layer_reach import Reach, find_reaches
from ..data.packed.packing import block_attention_mask
from .fused_target import fuse
from .layer_masks import build_masks
from .sharded_target import decoder_layers, find_decoder, is_sharded, load_sharded, wants_sharded_target

CHECKED_TOKENS = 128  # at each end of a document


def load_target(name, device, dtype="auto"):
    """(model, tokenizer) of a folder or Hub id: frozen, in eval mode. dtype auto: bfloat16 on a GPU, float32 on the CPU.

    Launched with FSDP (configs/accelerate/fsdp2.yaml), the ranks divide the model (sharded_target.py).

    Raises ValueError if there is no such model (before any weight is read), or if its weights cannot be read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ValueError(
            f"target {name!r}: there is no such folder{near_folder(name)}; give a model folder or a Hub id like org/name"
        )
    source = str(folder) if folder.is_dir() else name
    options = hub_options(source) | {
        "trust_remote_code": False
    }  # without a word, transformers would ask on the terminal
    config_code(source, trusted=False, advice="heads are trained for the library's own models", **hub_options(source))
    try:
        AutoConfig.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        hub = None if folder.is_dir() else ask_hub()
        told = f"{hub.words} did not give it" if hub and hub.why else _first_line(error)
        raise ValueError(
            f"target {name!r} is neither a model folder here nor a model on the Hub that can be read{near_folder(name)}: {told}"
        ) from error
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    if wants_sharded_target():
        return load_sharded(source, getattr(torch, dtype), device), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"the weights of the target {name!r} cannot be read: {_first_line(error)}; a file may be cut, damaged or "
            "missing: copy or download the model again"
        ) from error
    return model.to(device).eval().requires_grad_(False), tokenizer


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _least_head_dim(config):
    """The head dimension of a text config; where layers have different ones (Gemma-4), the least."""
    layers = getattr(config, "per_layer_config", None) or [config]
    return min(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers)


class FrozenTarget:
    """Features and distributions of a loaded model.

    model: *ForCausalLM. Raises ValueError if the model lacks parts that this file needs.
    """

    def __init__(self, model):
        self.model = model
        self.decoder = find_decoder(model)
        self.lm_head = model.get_output_embeddings()
        kind = type(model).__name__
        if not isinstance(self.lm_head, nn.Linear):
            raise ValueError(f"the target {kind} has no lm_head that is a torch.nn.Linear, got {self.lm_head!r}")
        takes = inspect.signature(self.decoder.forward).parameters
        missing = [name for name in ("attention_mask", "position_ids") if name not in takes]
        if missing:
            raise ValueError(
                f"{type(self.decoder).__name__}.forward takes no {' and no '.join(missing)}: packed rows cannot be kept "
                "apart in this target; a model with rotary or learned positions can be trained on"
            )
        self.reaches = find_reaches(model.config.get_text_config())
        if self.lm_head.weight.is_cuda:
            fuse(model)

    @property
    def max_positions(self):
        """The most positions that this target takes."""
        config = self.model.config.get_text_config()
        return position_limit(config) if getattr(config, "max_position_embeddings", None) else sys.maxsize

    def check_row_length(self, row_length):
        """ValueError if a row has more positions than this target takes."""
        if row_length > self.max_positions:
            raise ValueError(
                f"row_length {row_length} is more than the target's {self.max_positions} positions: lower it"
            )

    def limits_within(self, row_length):
        """Windows and chunks of the layers, in words, as far as documents of `row_length` tokens meet them; "" if none does."""
        limited = {kind: reach.within(row_length) for kind, reach in self.reaches.items()}
        return "; ".join(f"{kind or 'every layer'}: {reach}" for kind, reach in limited.items() if reach != Reach())

    def initialize(self, head):
        """Start `head` from this target. Raises ValueError if it cannot share the target's lm_head."""
        if head.uses_target_lm_head and self.lm_head.bias is not None:
            raise ValueError(
                "the target's lm_head has a bias, which shared heads cannot use: set shared_lm_head to false"
            )
        head.initialize_from_target(self.lm_head.weight, self.embedding)

    def layer_config(self, kind, **changes):
        """The config (`kind`: of an EAGLE family) of a head whose layer has the shape of this target's layers.

        changes: fields with other values. Raises ValueError for a target whose layers are not Llama's.
        """
        try:
            return kind.for_target(self.model.config, **changes)
        except AttributeError as error:
            raise ValueError(
                f"the layer of such a head is shaped as the target's, and a {self.model.config.model_type} target's config says no "
                f"{error.name}: take a target of the Llama kind, or train Medusa heads"
            ) from error
        except RuntimeError as error:  # transformers' own, for a size that is not the same in all layers
            raise ValueError(
                f"the layer of such a head is shaped as the target's, and those of a {self.model.config.model_type} target differ "
                f"({_first_line(error).partition('. ')[0]}): take a target of the Llama kind, or train Medusa heads"
            ) from error

    @property
    def is_sharded(self):
        """Whether each rank holds a part of the target. Then all ranks must make every pass together."""
        return is_sharded(self.model)

    @property
    def vocab_size(self):
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self):
        return self.lm_head.weight.shape[1]

    @property
    def num_layers(self):
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def dtype(self):
        return self.lm_head.weight.dtype

    @property
    def embedding(self):
        """The table of input embeddings [V, H]."""
        return self.model.get_input_embeddings().weight

    @torch.no_grad()
    def features(self, input_ids, position_ids, document_ids, layers=()):
        """`forward` without a graph."""
        return self.forward(input_ids, position_ids, document_ids, layers)

    def forward(self, input_ids, position_ids, document_ids, layers=()):
        """[B, T] each (document -1 on padding) -> [B, T, (1 + A) H]; documents of a row do not see each other.

        Side by side: the last hidden state after the final norm, then the residual streams of `layers` (A ids, low to high). Id k
        is the stream that enters layer k, counted from 0; the number of layers is the stream after the last layer, before the
        norm. Raises ValueError for layers that this target does not have.
        """
        with contextlib.ExitStack() as hooks:
            streams = self._record_streams(layers, hooks) if layers else {}
            attention = self._keep_apart(position_ids, document_ids, hooks)
            last = self.decoder(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention
            ).last_hidden_state
        for k, stream in streams.items():
            if stream.shape != last.shape:
                raise ValueError(
                    f"{type(self.decoder).__name__} keeps a residual stream of shape {list(stream.shape)} before layer {k}, not of "
                    f"[rows, tokens, {self.hidden_size}]: EAGLE-3 heads cannot read it; train Medusa or EAGLE heads"
                )
        return torch.cat([last, *(streams[k] for k in layers)], -1) if layers else last

    def split(self, features, layers):
        """Split the result of `features`: (last states [M, H] for the loss, the head's input [B, T, .]).

        A head reads the streams of its `layers`, side by side, or the last states if it names none.
        """
        last, streams = features[..., : self.hidden_size], features[..., self.hidden_size :]
        return last.flatten(0, 1), streams if layers else features

    def check_layers(self, layers):
        """The decoder's layers; ValueError if `layers` names one that it does not have."""
        count = self.num_layers
        stack = decoder_layers(self.decoder, count)
        if any(not 0 <= k <= count for k in layers) or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"layer ids must rise from 0 (the stream that enters the first layer) to at most {count} (after the last layer of "
                f"this target), got {list(layers)}"
            )
        return stack

    def _record_streams(self, layers, hooks):
        """{layer id: stream [B, T, H]}, filled by the next pass of the decoder; the hooks are removed when `hooks` closes."""
        stack, streams = self.check_layers(layers), {}

        def entering(k):
            def record(module, given, named):
                streams[k] = given[0] if given else named["hidden_states"]

            return record

        def leaving(module, given, output):
            # The output of the last layer. The library's hidden_states[-1] comes after the norm.
            streams[len(stack)] = output[0] if isinstance(output, tuple) else output

        for k in layers:
            if k < len(stack):
                handle = stack[k].register_forward_pre_hook(entering(k), with_kwargs=True)
            else:
                handle = stack[-1].register_forward_hook(leaving)
            hooks.callback(handle.remove)
        return streams

    def _keep_apart(self, position_ids, document_ids, hooks):
        """Arguments of the decoder that keep documents from seeing each other, and layers in their window, until `hooks` closes."""
        rows = self.reaches, position_ids, document_ids
        if not self._takes_flex_attention(document_ids.device):
            return {"attention_mask": build_masks(*rows, self._additive_mask)}
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("flex_attention")
        hooks.callback(self.model.set_attn_implementation, before)
        return {"attention_mask": build_masks(*rows, block_mask), "kernel_options": FLEX_OPTIONS}

    def _takes_flex_attention(self, device):
        """Whether packed rows use FlexAttention, which needs no [B, 1, T, T] mask and skips keys of other documents.

        Not with gradients: checkpointing's second forward would no longer find its mask.
        """
        passed_on = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(self.decoder.forward).parameters.values())
        fits = (
            _least_head_dim(self.model.config.get_text_config()) >= FLEX_LEAST_DIM
            and self.dtype in FLEX_DTYPES
            and passed_on
        )
        return device.type == "cuda" and self.model._supports_flex_attn and fits and not torch.is_grad_enabled()

    def _additive_mask(self, document_ids, window=None):
        # Additive and finite: eager attention adds any mask, and a padded row of -inf would become NaN.
        allowed = block_attention_mask(document_ids, window)  # [B, 1, T, T]
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)

    @torch.no_grad()
    def check(self, input_ids, position_ids, document_ids):
        """Raise ValueError unless the features of packed rows [B, T] determine the target's distribution.

        lm_head of the features must be the logits. The longest and the last document of each row must have the same features
        packed as in the plain model alone, at their first tokens and at their last. This finds scaled or capped logits, ignored
        masks, layers that carry a state from document to document, and windows other than those of the config.
        """
        for row in range(len(input_ids)):
            ids, places, documents = (part[row : row + 1] for part in (input_ids, position_ids, document_ids))
            packed = self._features_or_refusal(ids, places, documents)[0]
            real = documents[0][documents[0] >= 0]
            numbers, lengths = real.unique(return_counts=True)
            for document in {numbers[lengths.argmax()].item(), real[-1].item()}:
                inside = (documents[0] == document).nonzero()[:, 0]
                self._check_logits(ids[:, inside[:CHECKED_TOKENS]])
                self._check_alone(ids[:, inside], packed[inside])

    def _features_or_refusal(self, *rows):
        """`features`, with a ValueError for a model that cannot compute packed rows at all."""
        try:
            return self.features(*rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"{type(self.model).__name__} fails on a packed row, with a 4D attention mask: {_first_line(error)}. Take a target "
                "whose attention takes such masks"
            ) from error

    def _check_logits(self, text):
        """ValueError unless the logits of a text [1, L] are lm_head(last hidden state)."""
        logits = self.model(input_ids=text, use_cache=False).logits[0].float()
        alone = self.decoder(input_ids=text, use_cache=False).last_hidden_state[0]
        kind, scale = type(self.model).__name__, logits.abs().max().item()
        if alone.shape[-1] != self.lm_head.in_features:
            raise ValueError(
                f"the lm_head of {kind} takes {self.lm_head.in_features} features and its last hidden state has {alone.shape[-1]}: "
                "targets with layers between the two are not supported"
            )
        through_head = (self.lm_head(alone).float() - logits).abs().max().item()
        exact = 1e-4 if self.dtype == torch.float32 else 2e-2
        if not through_head <= exact * scale:
            raise ValueError(
                f"the logits of {kind} are not lm_head(last hidden state): they differ by {through_head:.3g} at a scale of "
                f"{scale:.3g}. Targets that scale or cap their logits are not supported"
            )

    def _check_alone(self, text, packed):
        """ValueError unless the model gives the text [1, L] alone the features `packed` [L, H]."""
        alone = self.decoder(input_ids=text, use_cache=False).last_hidden_state[0]
        loose = 1e-3 if self.dtype == torch.float32 else 5e-2
        # Documents that see each other differ at the first tokens, windows at the last. Logits of all would take gigabytes.
        for place, part in (("first", slice(CHECKED_TOKENS)), ("last", slice(-CHECKED_TOKENS, None))):
            expected, found = (self.lm_head(states[part]).float() for states in (alone, packed))
            # Packed and alone sum in different orders, so single values may differ in half precision: compare the means.
            difference, size = (found - expected).abs().mean().item(), expected.abs().mean().item()
            if not difference <= loose * size:
                kind, length = type(self.model).__name__, text.shape[1]
                masks = "; ".join(f"{name or 'every layer'}: {reach}" for name, reach in self.reaches.items())
                raise ValueError(
                    f"{kind} gives other features for a document of {length} tokens in a packed row than alone (mean difference "
                    f"of the logits at its {place} tokens {difference:.3g}, their mean size {size:.3g}). Masks were built from its "
                    f"config ({masks}): it does not follow them or the position ids, or has layers that carry a state from one "
                    "document to the next. Take another target; if it is only long documents that differ, a lower row_length"
                )
