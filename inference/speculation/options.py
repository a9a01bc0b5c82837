"""What a speculative_config asks for: what drafts, the tree, and the rule that accepts."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ...heads.checkpoint import check_head_fits, find_head, load_head, resolve_head
from ...heads.draft_vocabulary import missing_stop_tokens
from ...heads.eagle import Eagle
from ...heads.eagle3 import Eagle3
from ...heads.medusa import Medusa
from ...heads.mlp_speculator import MLPSpeculator
from ...heads.storage.keywords import ASKS_NOTHING, VLLM_SPECULATIVE, reject_unknown
from ...kernels.sampling.sample import MAX_WIDTH
from ..models.decoder import check_supported
from ..models.target_source import load_decoder, target_config
from .adaptive import Adaptive, PerBatchSize, buckets, depths_to_try
from .drafters.draft_model import DraftModelDrafter
from .drafters.eagle import Eagle3Drafter, EagleDrafter
from .drafters.medusa import MedusaDrafter
from .drafters.mlp_speculator import MLPSpeculatorDrafter
from .drafters.ngram import NgramDrafter
from .drawings import RATIO_VERIFIERS, check_drawing, verifier_of_method
from .tree import DEFAULT_DYNAMIC, MAX_NODES, ROOT_ONLY, DynamicTree, chain, load_tree
from .verify import VERIFIERS, Ratio, Synthetic, rates_for_length, strict

KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "adaptive",
    "num_speculative_tokens_per_batch_size",
    "tree",
    "verifier",
    "rejection_sample_method",
    "draft_sample_method",
    "acceptance_rates",
    "acceptance_length",
)
# vLLM's names of what drafts.
HEADS = {"medusa": Medusa, "mlp_speculator": MLPSpeculator, "eagle": Eagle, "eagle3": Eagle3}
METHODS = (*HEADS, "draft_model", "ngram")
# draft_sample_method: vLLM's names for two ways of drawing, ours for the others.
DRAFT_SAMPLE_METHODS = {
    "greedy": "deterministic",
    "probabilistic": "sampled",
    "shared_noise": "shared_noise",
    "top_and_one": "top_and_one",
}


@dataclass(frozen=True)
class DraftSource:
    """What drafts: a head (a module), a model of the target's vocabulary, or the sequence itself.

    method: one of METHODS; head: the module, or None; model, config: where a draft model comes from, and its config.
    """

    method: str
    head: nn.Module | None = None
    model: object = None
    config: object = None

    @property
    def depth(self):
        """How many tokens ahead it drafts unless told otherwise; None: that must be said."""
        return None if self.head is None else self.head.num_speculative_tokens

    @property
    def most(self):
        """How many tokens ahead it can draft."""
        return self.depth if self.method in ("medusa", "mlp_speculator") else MAX_NODES - 1


def check_speculative_config(config):
    """A copy of the speculative_config as a dict ({} for None), a revision in its model's name, or ValueError."""
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"speculative_config must be a dict or None, got {config!r:.80}")
    if config is None:
        return {}
    reject_unknown(config, KEYS, "speculative_config key", VLLM_SPECULATIVE, ASKS_NOTHING)
    config = {key: config[key] for key in config if key in KEYS}
    method, model = config.get("method"), config.get("model")
    if method is not None and method not in METHODS:
        raise ValueError(f"speculative_config['method'] must be one of {', '.join(METHODS)}, got {method!r}")
    lookup = [key for key in ("prompt_lookup_min", "prompt_lookup_max") if config.get(key) is not None]
    if method == "ngram":
        if model is not None:
            raise ValueError(
                f"the method 'ngram' copies from the sequence itself and takes no model, got {_named(model)}"
            )
        return _at_revision(dict(config))
    if lookup:
        raise ValueError(f"{lookup[0]} belongs to the method 'ngram': say method='ngram', or leave it out")
    if not isinstance(model, str | Path | nn.Module) and not is_draft_model(model):
        raise ValueError(
            "speculative_config needs 'model': what drafts, a head (a folder, a run, a Hub id or a module) or a smaller model of "
            "the same vocabulary; or method='ngram', which needs none"
        )
    return _at_revision(dict(config))


def _at_revision(speculative):
    """vLLM's key `revision` said as the model OWNER/NAME@REVISION, which is how heads are named everywhere."""
    revision, model = speculative.pop("revision", None), speculative.get("model")
    if revision is None:
        return speculative
    if not isinstance(revision, str) or not revision:
        raise ValueError(f"speculative_config['revision'] must name a branch, tag or commit, got {revision!r}")
    if not isinstance(model, str) or "@" in model or Path(model).is_dir() or speculative.get("method") == "draft_model":
        raise ValueError(
            f"speculative_config['revision'] is of a head on the Hub (model='OWNER/NAME'), and the model here is "
            f"{_named(model)}: leave it out"
        )
    return speculative | {"model": f"{model}@{revision}"}


def find_draft_source(speculative, target):
    """The DraftSource of a speculative_config, read but not yet on the device; None for plain decoding.

    target: the target's config. Raises ValueError for a head or model that does not fit it, or that is not of the method asked for.
    """
    if not speculative:
        return None
    method, model = speculative.get("method"), speculative.get("model")
    if method == "ngram":
        return DraftSource("ngram")
    if method == "draft_model" or (method is None and is_draft_model(model)):
        if isinstance(model, tuple(HEADS.values())):
            raise ValueError(
                f"speculative_config says method='draft_model', but {_named(model)} is a head: leave method out"
            )
        config, name = target_config(model, _load_format(model))
        check_supported(config)
        if config.vocab_size != target.get_text_config().vocab_size:
            raise ValueError(
                f"the draft model {name} has a vocabulary of {config.vocab_size} tokens, the target one of "
                f"{target.get_text_config().vocab_size}: a draft model speaks the target's tokens"
            )
        return DraftSource("draft_model", model=model, config=config)
    if isinstance(model, nn.Module):
        head = model
        if not isinstance(head, tuple(HEADS.values())):
            raise ValueError(
                f"speculative_config['model'] must be a head ({', '.join(HEADS)}) or a loaded *ForCausalLM, got a "
                f"{type(head).__name__} module"
            )
    else:
        head = load_head(model)
    found = next(name for name, kind in HEADS.items() if isinstance(head, kind))
    if method not in (None, found):
        raise ValueError(
            f"speculative_config says method={method!r}, but {_named(model)} is a head of the method {found!r}"
        )
    check_head_fits(head, target)
    if found == "eagle3":
        head.take_depth(target.get_text_config().num_hidden_layers)
    return DraftSource(found, head)


def warn_of_missing_stop_tokens(source, eos_token_ids):
    """A UserWarning for a head that cannot draft the end of an answer. No output is wrong: it takes a pass longer."""
    text = None if source is None else missing_stop_tokens(source.head, eos_token_ids)
    if text:
        warnings.warn(text, stacklevel=3)  # where the LLM is made


def _load_format(model):
    """A bare config stands for random weights of its shape."""
    return "auto" if isinstance(model, str | Path | nn.Module) else "dummy"


def is_draft_model(model):
    """Whether this is a draft model and not a head: a loaded one, its config, or a folder that holds no head."""
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, PreTrainedModel | PreTrainedConfig):
        return True
    is_folder = isinstance(model, str | Path) and (Path(model) / "config.json").is_file()
    return is_folder and find_head(model) is None


def _named(model):
    return f"this {type(model).__name__}" if isinstance(model, nn.Module) else str(model)


def build_drafter(source, speculative, tree, drawing, decoder, max_positions):
    """The drafter of a DraftSource, on the target's device.

    tree: what it is to draft; decoder: the target's Decoder; max_positions: longest sequence, the tree's places included
    """
    if source is None:
        return None
    depth = tree.max_depth
    if source.method == "ngram":
        return NgramDrafter(tree, *lookup_range(speculative))
    if source.method == "draft_model":
        load_format = _load_format(source.model)
        dtype, device = ("auto", "auto") if isinstance(source.model, nn.Module) else (decoder.dtype, decoder.device)
        draft = load_decoder(source.model, source.config, dtype, device, max_positions, load_format)
        if draft.device != decoder.device:
            raise ValueError(
                f"the draft model is on {draft.device}, the target on {decoder.device}: move one to the other"
            )
        return DraftModelDrafter(draft, depth, drawing)
    head = source.head
    if head is not speculative["model"]:
        head = head.to(decoder.device, decoder.dtype).eval()
    elsewhere = next((weight.device for weight in head.parameters() if weight.device != decoder.device), None)
    if elsewhere is not None:
        raise ValueError(f"the head is on {elsewhere}, the target on {decoder.device}: move one to the other")
    if source.method == "medusa":
        return MedusaDrafter(head, decoder.lm_head, drawing)
    if source.method == "mlp_speculator":
        return MLPSpeculatorDrafter(head, drawing)
    if head.needs_embedding or head.embedding_is_targets:  # an earlier engine's target may have been another one
        head.take_embedding(decoder.embedding)
    kind = EagleDrafter if source.method == "eagle" else Eagle3Drafter
    return kind(head, decoder, depth, drawing)


def lookup_range(speculative):
    """(fewest, most) tokens that prompt lookup compares; given one of them, both are that one, as in vLLM; given none, 1 to 4."""
    shortest, longest = speculative.get("prompt_lookup_min"), speculative.get("prompt_lookup_max")
    if shortest is None and longest is None:
        return 1, 4
    return (longest if shortest is None else shortest), (shortest if longest is None else longest)


def choose_tree(speculative, source):
    """The topology that a speculative_config asks for; source: DraftSource."""
    if source is None:
        return ROOT_ONLY
    depth = speculative.get("num_speculative_tokens")
    if depth is not None and (type(depth) is not int or not 1 <= depth <= source.most):
        limit = f"the head's {source.most}" if source.most == source.depth else str(source.most)
        raise ValueError(f"num_speculative_tokens must be from 1 to {limit}, got {depth!r}")
    name = speculative.get("tree", "chain")
    if not isinstance(name, str | Path):
        raise ValueError(
            f"speculative_config['tree'] must be 'chain', 'static', 'dynamic' or a tree file, got {name!r:.80}"
        )
    if name == "dynamic":
        deepest = depth or min(source.most, DEFAULT_DYNAMIC.max_depth)
        # Where it is shallow there may be fewer candidates than nodes: truncated() leaves as many.
        deepened = replace(DEFAULT_DYNAMIC, max_depth=max(deepest, DEFAULT_DYNAMIC.max_depth))
        tree = deepened.truncated(deepest)
    elif name == "chain":
        if depth is None and source.depth is None:
            raise ValueError(f"the method {source.method!r} needs num_speculative_tokens: how many tokens it drafts")
        tree = chain(depth or source.depth)
    else:
        tree = load_tree(static_tree_file(speculative.get("model"), source) if name == "static" else name)
    if isinstance(tree, DynamicTree) and source.method == "medusa":
        raise ValueError(
            "Medusa heads do not look at each other's tokens: they draft chains and static trees, not dynamic ones"
        )
    if source.method == "ngram":
        NgramDrafter(tree, *lookup_range(speculative))  # refuses what it cannot draft
    if tree.max_depth > source.most and name != "static":
        raise ValueError(
            f"{name} drafts {tree.max_depth} tokens deep, the head has {source.most}: measure a tree for this head"
        )
    return tree.truncated(depth or source.most)


def check_width(tree, vocab_size):
    """ValueError if a node has more candidates than can be drawn, or than there are tokens."""
    widest = tree.width if isinstance(tree, DynamicTree) else max(tree.widths, default=0)
    if widest > min(MAX_WIDTH, vocab_size):
        raise ValueError(
            f"the tree takes {widest} candidates behind a node, at most {min(MAX_WIDTH, vocab_size)} can be drawn of the target's "
            f"{vocab_size} tokens: narrow it"
        )


def choose_plan(speculative, tree, max_num_seqs):
    """How deep to draft in which step (adaptive.py); None: the whole tree in every one."""
    adaptive, told = speculative.get("adaptive", False), speculative.get("num_speculative_tokens_per_batch_size")
    if not isinstance(adaptive, bool):
        raise ValueError(f"speculative_config['adaptive'] must be True or False, got {adaptive!r}")
    if told is None:
        return Adaptive(depths_to_try(tree.max_depth), buckets(max_num_seqs)) if adaptive else None
    if adaptive:
        raise ValueError("adaptive measures what num_speculative_tokens_per_batch_size tells: give one of them")
    whole = isinstance(told, dict) and all(type(x) is int for pair in told.items() for x in pair)
    if (
        not whole
        or 1 not in told
        or min(told) < 1
        or not 0 <= min(told.values()) <= max(told.values()) <= tree.max_depth
    ):
        raise ValueError(
            "num_speculative_tokens_per_batch_size must be a dict {smallest batch size: tokens}, 1 among the batch sizes and "
            f"tokens from 0 to the tree's {tree.max_depth}, got {told!r}"
        )
    return PerBatchSize(told, tree.max_depth)


def static_tree_file(model, source):
    """The tree measured for this head (tree.json in its folder or its run), else the one shipped for its method and depth."""
    if source.head is None:
        raise ValueError(
            f"tree='static' is measured for a head, the method {source.method!r} has none: pass a tree file"
        )
    if not isinstance(model, nn.Module):
        folder = Path(resolve_head(model))
        runs = [parent for parent in list(folder.parents)[:3] if (parent / "config.yaml").is_file()]
        for place in (folder, *runs):
            if (place / "tree.json").is_file():
                return place / "tree.json"
    folder = Path(__file__).resolve().parents[2] / "configs" / "trees"
    shipped = folder / f"{source.method}-{source.depth}.json"
    if not shipped.is_file():
        known = ", ".join(sorted(path.name for path in folder.glob("*.json"))) or "none"
        raise ValueError(
            f"no static tree for {source.method} drafts of {source.depth} tokens (shipped: {known}): measure one with "
            "`headstart tree RUN`, which puts it where it is found"
        )
    return shipped


def choose_drawing(speculative, tree):
    """The names of the verifier and of the way of drawing, which fit each other and the tree."""
    name, method = speculative.get("verifier"), speculative.get("rejection_sample_method")
    if name is not None and method is not None:
        raise ValueError(
            f"verifier={name!r} and rejection_sample_method={method!r} say the same thing: give one of them"
        )
    if method is not None:
        name = verifier_of_method(method, tree)
    name = "strict" if name is None else name
    if name not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {name!r}")
    method = speculative.get("draft_sample_method")
    if method is None:
        ratio = "greedy" if isinstance(tree, DynamicTree) else "probabilistic"
        method = ratio if name in RATIO_VERIFIERS else "shared_noise"
    if not isinstance(method, str) or method not in DRAFT_SAMPLE_METHODS:
        raise ValueError(f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLE_METHODS)}, got {method!r}")
    drawing = DRAFT_SAMPLE_METHODS[method]
    check_drawing(name, drawing, tree)
    return name, drawing


def choose_verifier(name, speculative, tree, device):
    """The rule of this name, with what a speculative_config says of it."""
    rates, length = speculative.get("acceptance_rates"), speculative.get("acceptance_length")
    if name != "synthetic":
        if rates is not None or length is not None:
            raise ValueError("acceptance_rates and acceptance_length belong to the verifier 'synthetic'")
        return strict if name == "strict" else Ratio(name)
    if (rates is None) == (length is None):
        raise ValueError("the verifier 'synthetic' takes acceptance_rates or acceptance_length, one of the two")
    if isinstance(tree, DynamicTree):
        raise ValueError(
            "the verifier 'synthetic' accepts along the tree's deepest path: give it a chain or a static tree"
        )
    rule = Synthetic(rates if rates is not None else rates_for_length(length, tree.max_depth), device)
    if len(rule.rates) < tree.max_depth:
        raise ValueError(f"acceptance_rates has {len(rates)} positions, the drafts are {tree.max_depth} deep")
    return rule
