"""Log-probabilities of emitted tokens, from the raw logits (before temperature, top-k and top-p): vLLM's default."""

from dataclasses import dataclass

import torch


@dataclass
class Logprob:
    """log-probability of one token, its rank (1 = likeliest, ties to the lowest id), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(logits, tokens, count):
    """For each row the emitted token and the `count` likeliest.

    logits [J, V] fp32, tokens: J ids  ->  list of J dicts {token id: Logprob}, likeliest first, the emitted token always in it
    """
    results = []
    for row, token in zip(logits, tokens):
        # One row at a time, so that its bits do not depend on how many rows there are.
        logprobs = row - torch.logsumexp(row, -1)
        order = logprobs.sort(descending=True, stable=True).indices[:count].tolist()
        entry = {t: Logprob(logprobs[t].item(), rank) for rank, t in enumerate(order, 1)}
        if token not in entry:
            value = logprobs[token]
            earlier = (logprobs > value).sum() + (logprobs[:token] == value).sum()
            entry[token] = Logprob(value.item(), int(earlier) + 1)
        results.append(entry)
    return results
