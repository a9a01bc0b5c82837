"""The ways of drawing a node's children from the draft's law, and which verifier may follow which.

    deterministic   the k likeliest tokens, without chance                              noise: none
    shared_noise    top-k of log q + G, G the noise of the target's own token there     noise: TARGET_NOISE
    sampled         top-k of log q + G = k draws without replacement, in their order    noise: DRAFT_NOISE, see below
    top_and_one     the k - 1 likeliest, then one draw from the rest                    noise: DRAFT_NOISE, see below

The ratio rules (ratio_rules.py) need the draft's noise to be fresh in every step and at every node with children: they reject with
knowledge of tokens further down, so a token drawn again from the same noise is no longer a draw from q. Key it by
(seed, sample, position of the *root*, salted(DRAFT_NOISE, node)): the root moves in every step.

Letters: B requests, N nodes.
"""

import torch

from .tree import DynamicTree

DRAWINGS = ("deterministic", "shared_noise", "sampled", "top_and_one")
CHAIN_RULES = ("token", "block")
RATIO_VERIFIERS = (*CHAIN_RULES, "recursive", "traversal")
# vLLM's rejection_sample_method: the verifier on a chain, and on a tree.
VLLM_METHODS = {
    "strict": ("strict", "strict"),
    "probabilistic": ("token", "recursive"),
    "standard": ("token", "recursive"),
    "block": ("block", "traversal"),
    "synthetic": ("synthetic", "synthetic"),
}


def drawn_nodes(drawing, parents):
    """Which nodes' tokens are draws from their slot's law: ratio_rules.Draft.drawn.  parents [..., N] -> bool [..., N]

    For a request at temperature 0 none are. Raises ValueError for shared noise, which the ratio rules cannot follow.
    """
    if drawing == "deterministic":
        return torch.zeros_like(parents, dtype=torch.bool)
    if drawing == "sampled":
        return torch.ones_like(parents, dtype=torch.bool)
    if drawing == "top_and_one":
        node = torch.arange(parents.shape[-1], device=parents.device)
        younger = (parents[..., None, :] == parents[..., None]) & (node > node[:, None])
        return ~younger.any(-1)
    raise ValueError(f"drawing must be deterministic, sampled or top_and_one, got {drawing!r}")


def verifier_of_method(method, tree):
    """The verifier that vLLM's rejection_sample_method stands for with this topology (tree.Tree). ValueError for another name."""
    if not isinstance(method, str) or method not in VLLM_METHODS:
        raise ValueError(f"rejection_sample_method must be one of {', '.join(VLLM_METHODS)}, got {method!r}")
    return VLLM_METHODS[method][not tree.is_chain]


def check_drawing(verifier, drawing, tree):
    """Raise ValueError, saying why, if `verifier` would not keep the target's law behind children drawn so on this tree.Tree.

    strict emits the target's own tokens whatever was drafted, synthetic keeps no law anyway: both follow every way.
    """
    if verifier not in (*RATIO_VERIFIERS, "strict", "synthetic"):
        raise ValueError(f"verifier must be one of strict, {', '.join(RATIO_VERIFIERS)}, synthetic, got {verifier!r}")
    if drawing not in DRAWINGS:
        raise ValueError(f"drawing must be one of {', '.join(DRAWINGS)}, got {drawing!r}")
    if verifier not in RATIO_VERIFIERS:
        return
    if verifier in CHAIN_RULES and not tree.is_chain:
        other = "traversal" if verifier == "block" else "recursive"
        raise ValueError(
            f"verifier={verifier!r} is defined on chains only, this tree has siblings: a rejected token's law would be counted "
            f"twice; use verifier={other!r}"
        )
    if drawing == "shared_noise":
        raise ValueError(
            f"verifier={verifier!r} needs drafts drawn with noise of their own, fresh in every step; drawing='shared_noise' uses a "
            "position's noise again in the next step. Use drawing='sampled', or verifier='strict'"
        )
    if drawing == "deterministic":
        return
    if isinstance(tree, DynamicTree):
        raise ValueError(
            f"verifier={verifier!r} on a dynamic tree needs drafts chosen without chance: which of them are kept depends on the "
            "draft's law, so draws would be looked at because of what they are. Use drawing='deterministic', a static tree, or "
            "verifier='strict'"
        )
    slots = {}
    for node in range(1, tree.num_nodes):
        slots.setdefault(tree.parents[node], []).append(tree.ranks[node])
    for parent, ranks in slots.items():
        if ranks != list(range(len(ranks))):
            raise ValueError(
                f"the children of node {parent} have the ranks {ranks}: children drawn by drawing={drawing!r} are looked at in the "
                f"order of their drawing and none may be left out, so the ranks must be {list(range(len(ranks)))}"
            )
