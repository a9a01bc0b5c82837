"""What a speculative_config asks for: the head that drafts, the tree, and the rule that accepts."""

from pathlib import Path

from torch import nn

from ..heads.checkpoint import load_head, resolve_head
from ..heads.medusa import Medusa
from .draw_children import RATIO_VERIFIERS, check_drawing, verifier_of_method
from .keywords import VLLM_SPECULATIVE, reject_unknown
from .tree import ROOT_ONLY, chain, load_tree
from .verify import VERIFIERS, Ratio, Synthetic, rates_for_length, strict

KEYS = (
    "model",
    "num_speculative_tokens",
    "tree",
    "verifier",
    "rejection_sample_method",
    "draft_sample_method",
    "acceptance_rates",
    "acceptance_length",
)
# draft_sample_method: vLLM's names for two ways of drawing, ours for the others.
DRAFT_SAMPLE_METHODS = {
    "greedy": "deterministic",
    "probabilistic": "sampled",
    "shared_noise": "shared_noise",
    "top_and_one": "top_and_one",
}


def check_speculative_config(config):
    """A copy of the speculative_config as a dict ({} for None), or ValueError."""
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"speculative_config must be a dict or None, got {config!r:.80}")
    reject_unknown(config or {}, KEYS, "speculative_config key", VLLM_SPECULATIVE)
    if config is not None and not isinstance(config.get("model"), str | Path | nn.Module):
        raise ValueError(
            "speculative_config needs 'model': the head that drafts (a folder, a run, a Hub id or a module)"
        )
    return dict(config or {})


def load_drafter_head(head):
    """A Medusa head from a module, folder, run or Hub id."""
    if isinstance(head, nn.Module):
        if not isinstance(head, Medusa):
            raise ValueError(f"speculative_config['model'] must be a Medusa head, got a {type(head).__name__} module")
        return head
    return load_head(head)


def choose_tree(speculative, head):
    """The topology that a speculative_config asks for."""
    if head is None:
        return ROOT_ONLY
    most = head.num_speculative_tokens
    depth = speculative.get("num_speculative_tokens")
    depth = most if depth is None else depth
    if not isinstance(depth, int) or not 1 <= depth <= most:
        raise ValueError(f"num_speculative_tokens must be from 1 to the head's {most}, got {depth!r}")
    name = speculative.get("tree", "chain")
    if not isinstance(name, str | Path):
        raise ValueError(f"speculative_config['tree'] must be 'chain', 'static' or a tree file, got {name!r:.80}")
    if name == "chain":
        return chain(depth)
    tree = load_tree(static_tree_file(speculative["model"], most) if name == "static" else name)
    if tree.max_depth > most and name != "static":
        raise ValueError(
            f"{name} drafts {tree.max_depth} tokens deep, the head has {most}: measure a tree for this head"
        )
    return tree.truncated(depth)


def static_tree_file(head, num_heads):
    """The tree measured for this head (tree.json in its folder or its run), else the one shipped for its number of heads."""
    if not isinstance(head, nn.Module):
        folder = Path(resolve_head(head))
        runs = [parent for parent in list(folder.parents)[:3] if (parent / "config.yaml").is_file()]
        for place in (folder, *runs):
            if (place / "tree.json").is_file():
                return place / "tree.json"
    folder = Path(__file__).parent.parent / "configs" / "trees"
    shipped = folder / f"medusa-{num_heads}.json"
    if not shipped.is_file():
        known = ", ".join(sorted(path.name for path in folder.glob("*.json"))) or "none"
        raise ValueError(
            f"no static tree for {num_heads} heads (shipped: {known}): measure one with `headstart tree RUN` and pass its path"
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
        method = "probabilistic" if name in RATIO_VERIFIERS else "shared_noise"
    if method not in DRAFT_SAMPLE_METHODS:
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
    rule = Synthetic(rates if rates is not None else rates_for_length(length, tree.max_depth), device)
    if len(rule.rates) < tree.max_depth:
        raise ValueError(f"acceptance_rates has {len(rates)} positions, the drafts are {tree.max_depth} deep")
    return rule
