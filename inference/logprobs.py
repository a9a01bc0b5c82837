"""Log-probabilities of emitted tokens, from the raw logits (before temperature, top-k and top-p): vLLM's default."""

from dataclasses import dataclass

import torch

from ..kernels.sample import log_sum_exp


@dataclass
class Logprob:
    """log-probability of one token, its rank (1 = likeliest, ties to the lowest id), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def gather_logprobs(logits, tokens, count):
    """For each row the emitted token and the `count` likeliest, without waiting for the device.

    logits [J, V], tokens [J]  ->  (rank [J], ids [J, 1 + count], logprobs fp32 [J, 1 + count]); column 0 is the emitted token
    """
    count = min(count, logits.shape[1])
    normaliser = log_sum_exp(logits)[:, None]  # [J, 1]
    logits = logits.float()
    tokens = tokens[:, None]
    value = logits.gather(1, tokens)
    earlier = (logits == value) & (torch.arange(logits.shape[1], device=logits.device) < tokens)
    rank = 1 + ((logits > value) | earlier).sum(1)
    best = logits.sort(dim=-1, descending=True, stable=True)
    ids = torch.cat((tokens, best.indices[:, :count]), 1)
    return rank, ids, torch.cat((value, best.values[:, :count]), 1) - normaliser


def read_logprobs(tokens, rank, ids, logprobs):
    """What `gather_logprobs` left on the host, for the first len(tokens) rows.

    ->  list of dicts {token id: Logprob}, likeliest first, the emitted token always in it
    """
    results = []
    for row in range(len(tokens)):
        (token, *best), (value, *values) = ids[row].tolist(), logprobs[row].tolist()
        entry = {t: Logprob(v, place) for place, (t, v) in enumerate(zip(best, values), 1)}
        entry.setdefault(token, Logprob(value, int(rank[row])))
        results.append(entry)
    return results
