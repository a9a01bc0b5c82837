"""Requests in which a block drafter that was taught two of them (test_block.py) has drafts accepted, and their outputs."""

import torch

from headstart.inference.sampling_params import SamplingParams
from headstart.tests.inference.speculation.small_drafters import VOCAB

LENGTHS = (3, 15, 16, 17, 50, 57, 61, 63, 64, 65, 130)  # of the prompts: below, at and across tiles and pages
GROWING = (47, 49, 50)  # one page for the prompt and a small tree, two at the end
TEMPERATURES = (0.0, 0.8, 1.3)


def many_requests(known, count, max_tokens=12, lengths=LENGTHS):
    """(prompts, parameters) of `count` requests at all temperatures. Every third is greedy, and its prompt is one of `known`.

    lengths: of the other prompts
    """
    generator = torch.Generator().manual_seed(6)
    prompts, params = [], []
    for i in range(count):
        random = torch.randint(VOCAB, (lengths[i % len(lengths)],), generator=generator).tolist()
        prompts.append(random if i % 3 else list(known[i // 3 % len(known)]))
        temperature = TEMPERATURES[i % 3]
        params.append(
            SamplingParams(seed=i, temperature=temperature, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        )
    return prompts, params


def bits_of(llm, requests):
    """Tokens and log-probabilities of all requests, for equality."""
    found = [output.outputs[0] for output in llm.generate(*requests)]
    return [(one.token_ids, one.logprobs) for one in found]
