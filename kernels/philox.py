"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in integer tensor operations.

    key = (seed low, seed high), counter = (block, position, sample, purpose)  ->  four 32-bit integers

The integers are the same bits on every device: only 64-bit integer products, shifts and masks are used. `gumbel` turns them
into Gumbel noise keyed by (seed, sample index, position, token): token v takes word v % 4 of block v // 4.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

TARGET_NOISE = 0  # purposes: draws that must be independent of each other get different ones


def philox4x32(key, counter):
    """key: two, counter: four int64 tensors holding 32-bit values, broadcastable  ->  four int64 tensors of 32-bit values."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # The product of two 32-bit numbers wraps in a signed 64-bit one; its bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def random_words(seed, sample, position, num_tokens, purpose=TARGET_NOISE):
    """One 32-bit word per token.  seed, sample, position: int64 [...]  ->  int64 [..., num_tokens]"""
    block = torch.arange((num_tokens + 3) // 4, device=position.device)
    key = ((seed & _MASK)[..., None], ((seed >> 32) & _MASK)[..., None])
    counter = (block, position[..., None], sample[..., None], torch.tensor(purpose, device=position.device))
    words = torch.stack(torch.broadcast_tensors(*philox4x32(key, counter)), -1)
    return words.flatten(-2)[..., :num_tokens]


def gumbel(seed, sample, position, num_tokens, purpose=TARGET_NOISE):
    """Gumbel noise G = -log(-log u), u = (word + 1/2) / 2^32.  int64 [...] -> fp32 [..., num_tokens]

    u has 32 bits and the logarithms are taken in fp64: with 24-bit uniforms the largest draws would be too coarse.
    """
    uniform = (random_words(seed, sample, position, num_tokens, purpose).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()
