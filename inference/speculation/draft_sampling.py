"""Ways to sample a node's children from the draft's distribution, and the verifiers that each way allows.

    greedy          the k likeliest tokens                                              noise: none
    shared_noise    top-k of log q + G, G the noise of the target's own token there     noise: TARGET_NOISE
    sampled         top-k of log q + G = k draws without replacement, in their order    noise: DRAFT_NOISE, see below
    top_and_one     the k - 1 likeliest, then one draw from the rest                    noise: DRAFT_NOISE, see below

The ratio rules (ratio_rules.py) need fresh draft noise in every step and at every node with children: a rejection may depend on
deeper tokens, and reused noise would then bias the next draw. The noise is keyed by
(seed, sample, position of the *root*, salted(DRAFT_NOISE, node)), and the root moves in every step.

Letters: B requests, N nodes.
"""

import torch

OWN_NOISE = ("sampled", "top_and_one")  # of the draft. A node's k children are its first k draws: Tree.without_gaps
DRAFT_SAMPLING = ("greedy", "shared_noise", *OWN_NOISE)
CHAIN_RULES = ("token", "block")
RATIO_VERIFIERS = (*CHAIN_RULES, "recursive", "traversal")
VERIFIERS = ("strict", *RATIO_VERIFIERS, "synthetic")


def sampled_nodes(sampling, parents):
    """Whether each node's token is sampled: Draft.sampled.  parents [..., N] -> bool [..., N]

    A request at temperature 0 samples none. Raises ValueError for shared noise, which the ratio rules cannot follow.
    """
    if sampling == "greedy":
        return torch.zeros_like(parents, dtype=torch.bool)
    if sampling == "sampled":
        return torch.ones_like(parents, dtype=torch.bool)
    if sampling == "top_and_one":
        node = torch.arange(parents.shape[-1], device=parents.device)
        younger = (parents[..., None, :] == parents[..., None]) & (node > node[:, None])
        return ~younger.any(-1)
    raise ValueError(f"the way of sampling must be greedy, sampled or top_and_one, got {sampling!r}")


def check_sampling(verifier, sampling, tree):
    """Raise ValueError, saying why, if `verifier` cannot keep the target's distribution with this sampling on this tree.

    strict emits the target's own tokens whatever was drafted, and synthetic keeps no distribution: both allow every sampling.
    """
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    if sampling not in DRAFT_SAMPLING:
        raise ValueError(f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLING)}, got {sampling!r}")
    if verifier not in RATIO_VERIFIERS:
        return
    if verifier in CHAIN_RULES and not tree.is_chain:
        other = "traversal" if verifier == "block" else "recursive"
        raise ValueError(
            f"verifier={verifier!r} is defined on chains only, this tree has siblings: a rejected token's distribution would be "
            f"counted twice; use verifier={other!r}"
        )
    if sampling == "shared_noise":
        raise ValueError(
            f"verifier={verifier!r} needs drafts sampled with noise of their own, fresh in every step; "
            "draft_sample_method='shared_noise' uses a position's noise again in the next step. Use "
            "draft_sample_method='sampled', or verifier='strict'"
        )
    if sampling == "greedy":
        return
    if tree.grows:
        raise ValueError(
            f"verifier={verifier!r} on a dynamic tree needs drafts chosen without chance: which of them are kept depends on the "
            "draft's distribution, so a sample's own value would decide whether it is verified. Use "
            "draft_sample_method='greedy', a static tree, or verifier='strict'"
        )
    slots = {}
    for node in range(1, tree.num_nodes):
        slots.setdefault(tree.parents[node], []).append(tree.ranks[node])
    for parent, ranks in slots.items():
        if ranks != list(range(len(ranks))):
            raise ValueError(
                f"the children of node {parent} are listed with the ranks {ranks}, and draft_sample_method={sampling!r} needs "
                f"{list(range(len(ranks)))}: children are verified in the order in which they were sampled. List siblings by rank"
            )
