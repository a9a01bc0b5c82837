"""The G-test (likelihood ratio) of counts against a distribution."""

import torch


def surprise(counts, distribution):
    """-log10 of the p-value that counts [C] were drawn from the distribution [C] in fp64; cells of no chance must be empty."""
    possible = distribution > 0
    if counts[~possible].any():
        return 300.0
    seen, expected = counts[possible].double(), counts.sum() * distribution[possible]
    # The chi-square limit wants no rare cells: the rarest are taken together until five are expected.
    order = expected.argsort()
    rare = max(int((expected[order].cumsum(0) < 5).sum()) + 1, 1)
    if expected[order[0]] < 5:
        seen, expected = (torch.cat([x[order[:rare]].sum()[None], x[order[rare:]]]) for x in (seen, expected))
    statistic = 2 * torch.special.xlogy(seen, seen / expected).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return -torch.special.gammaincc(freedom, statistic / 2).clamp(min=1e-300).log10().item()
