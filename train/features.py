"""The frozen target as the trainers see it: packed rows in, features out; computed as they are needed or once for all rows.

The feature is the last hidden state after the final norm, and for heads that ask for them the residual streams that enter layers.
Any AutoModelForCausalLM will do whose logits are its lm_head applied to that state and whose attention follows an explicit 4D mask
and position ids; `FrozenTarget.check` tries it on real rows.

Letters: B rows, T tokens per row, R all rows, H hidden size, V vocabulary, A residual streams asked for.
"""

import contextlib
import inspect
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .data import block_attention_mask
from .sharded_target import decoder_layers, is_sharded, load_sharded, wants_sharded_target


def load_target(name, device, dtype="auto"):
    """(model, tokenizer) of a folder or Hub id: frozen, in eval mode. dtype auto: bfloat16 on a GPU, float32 on the CPU.

    Launched with FSDP (configs/accelerate/fsdp2.yaml), the ranks divide it among them (sharded_target.py).

    Raises ValueError, before any weight is read, if there is no such model, and if its weights cannot be read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ValueError(f"target {name!r}: there is no such folder; give a model folder or a Hub id like org/name")
    source = str(folder) if folder.is_dir() else name
    try:
        AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target {name!r} is neither a model folder here nor a model on the Hub that can be read: {_first_line(error)}"
        ) from error
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    if wants_sharded_target():
        return load_sharded(source, getattr(torch, dtype), device), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"the weights of the target {name!r} cannot be read: {_first_line(error)}; a file may be cut, damaged or "
            "missing: copy or download the model again"
        ) from error
    return model.to(device).eval().requires_grad_(False), tokenizer


def _first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class FrozenTarget:
    """Features and laws of a loaded model.

    model: *ForCausalLM. Raises ValueError if its parts are not those this file needs.
    """

    def __init__(self, model):
        self.model = model
        self.decoder = model.get_decoder()
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

    def check_row_length(self, row_length):
        """The most positions this target takes; ValueError if a row is longer."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        if row_length > longest:
            raise ValueError(f"row_length {row_length} is more than the target's {longest} positions: lower it")
        return longest

    def initialize(self, head):
        """Start `head` from this target. Raises ValueError where it cannot share the target's lm_head."""
        if head.config.shared_lm_head and self.lm_head.bias is not None:
            raise ValueError(
                "the target's lm_head has a bias, which shared heads cannot use: set shared_lm_head to false"
            )
        head.initialize_from_target(self.lm_head.weight)

    def layer_config(self, kind, **changes):
        """The config (`kind`: of an EAGLE family) of a head whose layer is shaped as this target's are.

        changes: fields that shall be otherwise. Raises ValueError for a target with layers of another kind than Llama's.
        """
        try:
            return kind.for_target(self.model.config, **changes)
        except AttributeError as error:
            raise ValueError(
                f"the layer of such a head is shaped as the target's, and a {self.model.config.model_type} target's config says no "
                f"{error.name}: take a target of the Llama kind, or train Medusa heads"
            ) from error

    @property
    def is_sharded(self):
        """Do the ranks hold a part of it each? Then every pass is one that all of them make."""
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
        """[B, T] each (document -1 on padding) -> [B, T, (1 + A) H]; documents of a row do not see each other.

        The last hidden state after the final norm, then the residual streams of `layers` (A ids, low to high), side by side: id k
        is the stream that enters layer k, counted from 0, and the number of layers is the one behind the last, before the
        norm. Raises ValueError for layers that this target does not have.
        """
        with contextlib.ExitStack() as hooks:
            streams = self._record_streams(layers, hooks) if layers else {}
            last = self.decoder(
                input_ids=input_ids,
                attention_mask=self._additive_mask(document_ids),
                position_ids=position_ids,
                use_cache=False,
            ).last_hidden_state
        return torch.cat([last, *(streams[k] for k in layers)], -1) if layers else last

    def check_layers(self, layers):
        """The decoder's layers, if those whose streams are asked for are among them; else ValueError."""
        count = self.num_layers
        stack = decoder_layers(self.decoder, count)
        if any(not 0 <= k <= count for k in layers) or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"layer ids must rise from 0 (the stream that enters the first layer) to at most {count} (behind the last layer of "
                f"this target), got {list(layers)}"
            )
        return stack

    def _record_streams(self, layers, hooks):
        """{layer id: stream [B, T, H]}, filled by the next pass of the decoder; the hooks go when `hooks` closes."""
        stack, streams = self.check_layers(layers), {}

        def entering(k):
            def record(module, given, named):
                streams[k] = given[0] if given else named["hidden_states"]

            return record

        def leaving(module, given, output):
            # Behind the last layer and not hidden_states[-1] of the library, which is behind the norm.
            streams[len(stack)] = output[0] if isinstance(output, tuple) else output

        for k in layers:
            if k < len(stack):
                handle = stack[k].register_forward_pre_hook(entering(k), with_kwargs=True)
            else:
                handle = stack[-1].register_forward_hook(leaving)
            hooks.callback(handle.remove)
        return streams

    def _additive_mask(self, document_ids):
        # Additive and finite: eager attention adds whatever it is given, and a padded row of -inf would turn into NaN.
        allowed = block_attention_mask(document_ids)  # [B, 1, T, T]
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)

    @torch.no_grad()
    def check(self, input_ids, position_ids, document_ids):
        """Raise ValueError unless the features of one packed row [1, T] are all there is to the target's law.

        The last document of the row, packed, must give what the plain model gives on that text alone, and lm_head of the
        features must be the logits: that finds scaled or capped logits, ignored masks and sliding windows.
        """
        packed = self.features(input_ids, position_ids, document_ids)[0]
        last = document_ids[0][document_ids[0] >= 0][-1]
        inside = (document_ids[0] == last).nonzero()[:, 0]
        text = input_ids[:, inside]
        logits = self.model(input_ids=text, use_cache=False).logits[0].float()
        alone = self.decoder(input_ids=text, use_cache=False).last_hidden_state[0]
        kind = type(self.model).__name__
        scale = logits.abs().max().item()
        through_head = (self.lm_head(alone).float() - logits).abs().max().item()
        exact = 1e-4 if self.dtype == torch.float32 else 2e-2
        if not through_head <= exact * scale:
            raise ValueError(
                f"the logits of {kind} are not lm_head(last hidden state): they differ by {through_head:.3g} at a scale of "
                f"{scale:.3g}. Targets that scale or cap their logits are not supported"
            )
        # Packed and alone take other reduction orders, so single values may differ in half precision: compare the means.
        difference = (self.lm_head(packed[inside]).float() - logits).abs().mean().item()
        loose = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not difference <= loose * logits.abs().mean().item():
            raise ValueError(
                f"{kind} gives other features for a document in a packed row than alone (mean difference of the logits "
                f"{difference:.3g}, their mean size {logits.abs().mean().item():.3g}): it does not follow the 4D attention "
                f"mask or the position ids, or its sliding window is shorter than the document's {len(inside)} tokens"
            )


def cache_features(run, recipe, target, packed, stop, layers=()):
    """A FeatureCache of all rows in the run's folder, filled; None if `stop` (StopSignals) ended that early.

    run: RunFolder; layers: whose streams are kept beside the last states.
    """
    dtype = target.dtype if recipe.cache_dtype == "auto" else getattr(torch, recipe.cache_dtype)
    width = (1 + len(layers)) * target.hidden_size
    cache = FeatureCache(run.path, *packed.input_ids.shape, width, dtype, run.accelerator, run.note)
    return cache if cache.fill(target, packed, recipe.batch_rows, run.accelerator, stop, layers) else None


class FeatureCache:
    """Features of all rows, computed once, in a memory-mapped file of the run folder.

    The file is removed from the folder as soon as it is open everywhere; the system frees its space when the run ends, however
    it ends. On a machine with enough memory it is read from the page cache, never from the disk.
    """

    def __init__(self, folder, num_rows, row_length, width, dtype, accelerator, note):
        """Reserve the file; `note(text)` is told its size first. width: values per token, of all layers together.

        Raises ValueError if the disk is too small.
        """
        if int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)) != accelerator.num_processes:
            raise ValueError("cache_features works on one machine only: set it to false for a run over several")
        count = num_rows * row_length * width
        num_bytes = count * dtype.itemsize
        path = Path(folder, "features.cache")
        free = shutil.disk_usage(folder).free
        note(
            f"feature cache: {num_rows} rows x {row_length} tokens x {width} values in {dtype} take "
            f"{num_bytes / 1e6:,.0f} MB of disk or page cache in {folder} ({free / 1e6:,.0f} MB free)"
        )
        if num_bytes > free:
            raise ValueError(
                f"the feature cache needs {num_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: set "
                "cache_features to false (features are then computed as they are needed) or lower max_tokens"
            )
        if accelerator.is_main_process:
            with open(path, "wb") as file:
                # Reserved, not sparse: a disk that fills up later would kill the run with a bus error.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        accelerator.wait_for_everyone()
        stored = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
        self.stored = stored.view(num_rows, row_length, width)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            path.unlink()

    def fill(self, target, packed, batch_rows, accelerator, stop, layers=()):
        """Compute every row, with the streams of `layers`, shared out over the ranks.

        Returns False if `stop` (StopSignals) ended it early.
        """
        self.target_dtype = target.dtype
        stride = accelerator.num_processes * batch_rows
        with tqdm(
            total=len(self.stored),
            desc="features",
            unit="row",
            disable=not accelerator.is_main_process,
            dynamic_ncols=True,
        ) as bar:
            for first in range(0, len(self.stored), stride):
                # A sharded target's passes are made by all ranks together: they leave together, and none of them is left out.
                if stop.agreed(accelerator) if target.is_sharded else stop.requested:
                    break
                start = first + accelerator.process_index * batch_rows
                has_rows = start < len(self.stored)
                if not has_rows and not target.is_sharded:
                    break
                rows = slice(start, start + batch_rows) if has_rows else slice(0, 1)
                batch = [
                    part[rows].to(accelerator.device)
                    for part in (packed.input_ids, packed.position_ids, packed.document_ids)
                ]
                features = target.features(*batch, layers)
                if has_rows:
                    self.stored[rows] = features.to(self.stored)
                bar.update(min(accelerator.num_processes * len(batch[0]), len(self.stored) - bar.n))
        return not stop.agreed(accelerator)

    def rows(self, index, device):
        """Features of the rows `index` (int64 array [B]) in the target's dtype -> [B, T, width] on `device`."""
        return self.stored[torch.from_numpy(index)].to(device, self.target_dtype)
