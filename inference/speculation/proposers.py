"""Sources of drafts, read but not yet on the target's device: a head, a model of the target's vocabulary, the sequence itself."""

import warnings
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from ...heads.checkpoint import check_head_fits, find_head, load_head, resolve_head
from ...heads.draft_vocabulary import missing_stop_tokens
from ...heads.families import FAMILIES, family_of
from ...heads.head import Head
from ..models.support import check_supported
from ..models.target_source import load_decoder, target_config
from .drafters.draft_model import DraftModelDrafter
from .drafters.lm_heads import LMHeads
from .drafters.ngram import NgramDrafter
from .options import is_config, name_of
from .tree import MAX_NODES

TREES = Path(__file__).resolve().parents[2] / "configs" / "trees"


class Proposer:
    """A source of drafts.

    method: one of options.METHODS; head: the module, or None; depth: its default depth of drafts, None: there is no default;
    max_depth: the greatest
    """

    method, head, depth, max_depth = "", None, None, MAX_NODES - 1

    def check_tree(self, tree):
        """ValueError for a tree that it cannot draft."""

    def static_tree_file(self):
        """The file of the tree measured for it, else of the tree shipped for its method and depth; ValueError if there is none."""
        raise ValueError(f"the method {self.method!r} has no measured tree: name a tree file instead of static")

    def build(self, tree, sampling, decoder, max_positions):
        """Its Drafter on the target's device.

        tree: the tree to draft; sampling: a way of draft_sampling.py; decoder: the target's Decoder; max_positions: longest
        sequence, the tree's places included. ValueError if a loaded module is on another device.
        """
        raise NotImplementedError


class HeadProposer(Proposer):
    """A head of any family. source: as the user named it. A module is used in place; weights read go to the target's device.

    ranks_asked: draft_tensor_parallel_size; quantization: None or "fp8"
    """

    def __init__(self, head, source, ranks_asked=None, quantization=None):
        self.head, self.source, self.family, self.ranks_asked = head, source, family_of(head), ranks_asked
        self.quantization = quantization
        self.method = self.family.key
        self.depth = head.num_speculative_tokens
        self.max_depth = head.max_speculative_tokens or MAX_NODES - 1

    @property
    def drafter(self):
        """What makes a Drafter of the family: its class, or a function."""
        return import_module(f"..drafters.{self.method}", __name__).DRAFTER

    def check_tree(self, tree):
        most = self.head.max_candidates
        if most is not None and tree.width > most:
            raise ValueError(
                f"the tree takes {tree.width} candidates after a node, this head chooses among {most}: narrow the tree"
            )

    def static_tree_file(self):
        """tree.json in the head's folder or its run, else the shipped tree."""
        if not isinstance(self.source, nn.Module):
            folder = Path(resolve_head(self.source))
            runs = [parent for parent in list(folder.parents)[:3] if (parent / "config.yaml").is_file()]
            for place in (folder, *runs):
                if (place / "tree.json").is_file():
                    return place / "tree.json"
        shipped = TREES / f"{self.method}-{self.depth}.json"
        if not shipped.is_file():
            known = ", ".join(sorted(path.name for path in TREES.glob("*.json"))) or "none"
            raise ValueError(
                f"no static tree for {self.method} drafts of {self.depth} tokens (shipped: {known}): measure one with "
                "`headstart tree RUN`, which puts it where it is found"
            )
        return shipped

    def build(self, tree, sampling, decoder, max_positions):
        head = self.head
        if head is not self.source:
            head = head.to(decoder.device, decoder.dtype).eval()
        elsewhere = next((weight.device for weight in head.parameters() if weight.device != decoder.device), None)
        if elsewhere is not None:
            raise ValueError(f"the head is on {elsewhere}, the target on {decoder.device}: move one to the other")
        if head.needs_embedding or head.embedding_is_targets:  # an earlier engine may have had another target
            head.take_embedding(decoder.whole_embedding())
        drafter = self.drafter(head, decoder, tree.max_depth, sampling)
        if self.quantization:
            if decoder.device.type == "cuda" and drafter.dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"quantization={self.quantization!r} takes drafts in bfloat16 or float16 on a GPU, got {drafter.dtype}: "
                    "give the LLM, or the head's module, another dtype"
                )
            drafter.quantise(release=head is not self.source)
            return drafter
        if head is not self.source:
            drafter.freeze()
        if decoder.ranks.size > 1:
            drafter.place_lm_heads(LMHeads(decoder.ranks, self.ranks_asked))
        return drafter


class ModelProposer(Proposer):
    """A smaller model. source: as LLM takes a model; config: its Hugging Face config."""

    method = "draft_model"

    def __init__(self, source, config):
        self.source, self.config = source, config

    def build(self, tree, sampling, decoder, max_positions):
        dtype, device = ("auto", "auto") if isinstance(self.source, nn.Module) else (decoder.dtype, decoder.device)
        load_format = _load_format(self.source)
        draft = load_decoder(
            self.source, self.config, dtype=dtype, device=device, max_positions=max_positions, load_format=load_format
        )
        if draft.device != decoder.device:
            raise ValueError(
                f"the draft model is on {draft.device}, the target on {decoder.device}: move one to the other"
            )
        return DraftModelDrafter(draft, tree.max_depth, sampling)


class NgramProposer(Proposer):
    """Prompt lookup of `shortest` to `longest` tokens."""

    method = "ngram"

    def __init__(self, shortest, longest):
        self.range = shortest, longest

    def check_tree(self, tree):
        NgramDrafter(tree, *self.range)  # refuses what it cannot draft

    def build(self, tree, sampling, decoder, max_positions):
        return NgramDrafter(tree, *self.range)


def find_proposer(options, target):
    """The Proposer of SpeculativeOptions.

    target: the target's config. Raises ValueError if the head or draft model does not fit it, or contradicts options.method.
    """
    method, model, ranks = options.method, options.model, options.draft_tensor_parallel_size
    by_model = method == "draft_model" or (method is None and is_draft_model(model))
    if ranks not in (None, 1) and (method == "ngram" or by_model):
        raise ValueError(
            f"draft_tensor_parallel_size={ranks} divides lm_heads of heads, and every rank holds a draft model whole: leave it out"
        )
    if options.quantization and (method == "ngram" or by_model):
        raise ValueError(
            f"quantization={options.quantization!r} rounds weights of heads, and the method {method or 'draft_model'!r} has none: "
            "leave it out"
        )
    if method == "ngram":
        return NgramProposer(*options.lookup_range)
    text = target.get_text_config()
    if by_model:
        if isinstance(model, Head):
            raise ValueError(
                f"speculative_config says method='draft_model', but {name_of(model)} is a head: leave method out"
            )
        config, name = target_config(model, _load_format(model))
        check_supported(config)
        if config.vocab_size != text.vocab_size:
            raise ValueError(
                f"the draft model {name} has a vocabulary of {config.vocab_size} tokens, the target one of {text.vocab_size}: "
                "a draft model speaks the target's tokens"
            )
        return ModelProposer(model, config)
    if isinstance(model, nn.Module) and not isinstance(model, Head):
        known = ", ".join(family.key for family in FAMILIES)
        raise ValueError(
            f"speculative_config['model'] must be a head ({known}) or a loaded *ForCausalLM, got a {type(model).__name__} module"
        )
    head = model if isinstance(model, Head) else load_head(model)
    proposer = HeadProposer(head, model, ranks, options.quantization)
    if method not in (None, proposer.method):
        raise ValueError(
            f"speculative_config says method={method!r}, but {name_of(model)} is a head of the method {proposer.method!r}"
        )
    if options.quantization and not getattr(proposer.drafter, "can_quantise", False):
        raise ValueError(
            f"quantization={options.quantization!r} is not there for heads of the method {proposer.method!r}: leave it out"
        )
    check_head_fits(proposer.head, target)
    proposer.head.take_depth(text.num_hidden_layers)
    return proposer


def _load_format(model):
    """load_format of a draft model: a bare config stands for random weights of its shape."""
    return "dummy" if is_config(model) else "auto"


def is_draft_model(model):
    """Whether this is a draft model and not a head: a loaded model, the config of a model, or a folder that holds no head."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) or is_config(model):
        return True
    is_folder = isinstance(model, str | Path) and (Path(model) / "config.json").is_file()
    return is_folder and find_head(model) is None


def warn_of_missing_stop_tokens(head, eos_token_ids):
    """Warn (UserWarning) of a head that cannot draft the end of an answer. Outputs stay right, but take one more pass."""
    text = None if head is None else missing_stop_tokens(head, eos_token_ids)
    if text:
        warnings.warn(text, stacklevel=3)  # where the LLM is made
