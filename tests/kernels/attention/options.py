"""What the tests of attention ask for beside a window."""

from dataclasses import replace

import torch

from headstart.kernels.attention.attention_fold import AttentionOptions

CAP = 1.5  # of scores of 1 and more
KINDS = ("softcap", "sinks", "all")


def given(what, q):
    """AttentionOptions for queries [..., HQ, D]: a window, or what a name of KINDS says."""
    if what is None or isinstance(what, int):
        return AttentionOptions(window=what)
    sinks = torch.linspace(-1, 2, q.shape[-2], device=q.device).to(q.dtype)
    options = {
        "softcap": AttentionOptions(softcap=CAP),
        "sinks": AttentionOptions(sinks=sinks),
        "all": AttentionOptions(scale=0.3, window=70, softcap=CAP, sinks=sinks),
    }
    return options[what]


def dense(q, k, v, seen, options):
    """The formula in fp64.  q [N, HQ, D], k and v [S, HK, D], seen [N, S] without the window -> [N, HQ, D]"""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,shd->nhs", q, k.repeat_interleave(groups, 1)) * (options.scale or q.shape[-1] ** -0.5)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double()[None, :, None].expand(len(q), -1, 1)), 2)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("nhs,shd->nhd", weights, v.repeat_interleave(groups, 1))


def mutants(options):
    """Options that differ in one thing, whose results have to differ."""
    yield replace(options, scale=(options.scale or 0.25) * 1.1)
    if options.window:
        yield replace(options, window=options.window + 1)
    if options.softcap is not None:
        yield replace(options, softcap=None)
    if options.sinks is not None:
        yield replace(options, sinks=None)
        yield replace(options, sinks=options.sinks + 0.7)  # a sink that is counted twice
