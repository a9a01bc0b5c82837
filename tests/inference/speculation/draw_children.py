"""Plain implementation of drawing a node's children, for comparison with the drafters' kernels. The ways: draft_sampling.py.

Letters: V vocabulary, k children.
"""

import torch

from headstart.inference.speculation.draft_sampling import DRAFT_SAMPLING


def draw_children(log_q, num_children, drawing, noise=None):
    """The tokens of `num_children` children in the order of their drawing.  log_q, noise [..., V] -> int64 [..., k]

    log_q: log of the draft's distribution after temperature, top-k and top-p, minus infinity outside its support; any constant
    may be added. noise: Gumbel noise; 0 in the rows of a request at temperature 0, whose children are then the likeliest tokens
    in every way of drawing. Ties go to the lowest token. Where the support is smaller than k, the last slots are empty: -1.
    Raises ValueError for another way of drawing, and for noise that is missing or not wanted.
    """
    if drawing not in DRAFT_SAMPLING:
        raise ValueError(f"drawing must be one of {', '.join(DRAFT_SAMPLING)}, got {drawing!r}")
    if (noise is None) != (drawing == "greedy"):
        raise ValueError(f"drawing={drawing!r} takes {'no ' if noise is not None else ''}noise")
    if drawing != "top_and_one":
        return top(log_q if noise is None else log_q + noise, num_children)
    first = top(log_q, num_children - 1)
    rest = log_q
    for i in range(num_children - 1):  # one by one: empty slots stand for no token
        chosen = first[..., i : i + 1]
        rest = torch.where(chosen >= 0, rest.scatter(-1, chosen.clamp(min=0), -torch.inf), rest)
    return torch.cat([first, top(rest + noise, 1)], -1)


def top(scores, k):
    """The tokens of the k highest scores, best first, -1 where a score is minus infinity.  [..., V] -> [..., k]"""
    best, tokens = scores.sort(dim=-1, descending=True, stable=True)
    tokens = tokens.masked_fill(best == -torch.inf, -1)[..., :k]
    return torch.nn.functional.pad(tokens, (0, k - tokens.shape[-1]), value=-1)
