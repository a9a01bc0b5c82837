"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in integer tensor operations.

    key = (seed low, seed high), counter = (block, position, sample, purpose)  ->  four 32-bit integers

The integers are the same bits on every device: only 64-bit integer products, shifts and masks are used. `gumbel` turns them
into Gumbel noise keyed by (seed, sample index, position, token): token v takes word v % 4 of block v // 4; `uniform` turns them
into numbers in [0, 1).

The device functions compute the same for kernels: `philox_words`, `chunk_words`, `token_words`, `gumbel_of_word`;
`rough_exponential` tells which few tokens need it.
"""

import torch

from ..jit import INTERPRETED, jit, tl

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

# Purposes: draws that must be independent of each other have different purposes.
TARGET_NOISE = 0  # the target's own tokens, keyed by the position of the token drawn
# The next three are keyed by the position of a step's root, so no step uses the noise of another again.
DRAFT_NOISE = 1  # children of a node; salted with the node's number
ACCEPT_UNIFORM = 2  # a uniform per node
RESIDUAL_NOISE = 3  # the token after the accepted path
NUM_PURPOSES = 4
# The most by which a rough_exponential differs from the true one, as a part of it. Over all words it is half of this.
ROUGHNESS = tl.constexpr(1e-4)
_ON_NVIDIA = tl.constexpr(not INTERPRETED and torch.version.hip is None)


def philox4x32(key, counter):
    """key: two, counter: four int64 tensors holding 32-bit values, broadcastable  ->  four int64 tensors of 32-bit values."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # The product of two 32-bit numbers wraps around in a signed 64-bit integer; its bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def random_words(seed, sample, position, num_tokens, purpose=TARGET_NOISE):
    """One 32-bit word per token.  seed, sample, position, purpose: int64 [...]  ->  int64 [..., num_tokens]"""
    block = torch.arange((num_tokens + 3) // 4, device=position.device)
    key = ((seed & _MASK)[..., None], ((seed >> 32) & _MASK)[..., None])
    purpose = torch.as_tensor(purpose, device=position.device)
    counter = (block, position[..., None], sample[..., None], purpose[..., None])
    words = torch.stack(torch.broadcast_tensors(*philox4x32(key, counter)), -1)
    return words.flatten(-2)[..., :num_tokens]


def gumbel(seed, sample, position, num_tokens, purpose=TARGET_NOISE):
    """Gumbel noise G = -log(-log u), u = (word + 1/2) / 2^32.  int64 [...] -> fp32 [..., num_tokens]

    u has 32 bits and the logarithms are taken in fp64: with 24-bit uniforms the largest draws would be too coarse.
    """
    uniform = (random_words(seed, sample, position, num_tokens, purpose).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def uniform(seed, sample, position, count, purpose=ACCEPT_UNIFORM):
    """word / 2^32, exactly: 32 bits in [0, 1).  int64 [...] -> fp64 [..., count]

    Not fp32: with 24 bits 0, which is accepted wherever p > 0, would be 256 times as likely, or the largest words would become 1.
    """
    return random_words(seed, sample, position, count, purpose).double() * 2.0**-32


def salted(purpose, node):
    """A purpose for every node of a draft, so that each node draws by itself. Takes ints or int64 tensors."""
    return purpose + NUM_PURPOSES * node


@jit
def philox_words(block, seed, sample, position, purpose):
    """The four words of `block` (a tensor of integers) as four uint32 tensors; the other arguments are int64 scalars."""
    multiply_0: tl.constexpr = 0xD2511F53
    multiply_1: tl.constexpr = 0xCD9E8D57
    c0 = block.to(tl.uint32)
    c1 = position.to(tl.uint32) + c0 * 0
    c2 = sample.to(tl.uint32) + c0 * 0
    c3 = (c0 * 0 + purpose).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    m0, m1 = tl.full(c0.shape, multiply_0, tl.uint64), tl.full(c0.shape, multiply_1, tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * m0, c2.to(tl.uint64) * m1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        # The increments as signed 32-bit numbers: 0x9E3779B9 and 0xBB67AE85, modulo 2^32.
        k0, k1 = (k0.to(tl.int32) - 1640531527).to(tl.uint32), (k1.to(tl.int32) - 1150833019).to(tl.uint32)
    return c0, c1, c2, c3


@jit
def gumbel_of_word(word):
    """-log(-log((word + 1/2) / 2^32)) in fp64, as fp32.  uint32 -> fp32"""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32, exactly
    return -tl.log(-tl.log(uniform)).to(tl.float32)


@jit
def rough_log2(x):
    """log2 of a normal x, off by 2^-22 or, outside [1/2, 2], that part of it: one instruction on NVIDIA's GPUs.  fp32 -> fp32"""
    if _ON_NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@jit
def rough_exponential(word):
    """-log2 u to within ROUGHNESS of it, u = (word + 1/2) / 2^32.  uint32 -> fp32

    The noise is its negative logarithm, less a constant. Where u is above 1/2, 1 - u comes from the word's complement: fp32 would
    lose its last bits.
    """
    complement = word ^ 0xFFFFFFFF
    x = tl.fma(tl.minimum(word, complement).to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    # -log2(1 - x) / x by a polynomial of least relative error up to 1/2
    series = tl.fma(x, tl.fma(x, tl.fma(x, tl.fma(x, 1.0750942, -0.0834229), 0.5710243), 0.7152612), 1.44275903)
    return tl.where(word > complement, x * series, -rough_log2(x))


@jit
def chunk_words(start, seed, sample, position, purpose, COUNT: tl.constexpr):
    """Words of the tokens start .. start + COUNT; start and COUNT are multiples of 4.  -> uint32 [COUNT]"""
    w0, w1, w2, w3 = philox_words(start // 4 + tl.arange(0, COUNT // 4), seed, sample, position, purpose)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@jit
def token_words(token, seed, sample, position, purpose):
    """Words of any tokens: four times the work of chunk_words.  int32 [...] -> uint32 [...]"""
    w0, w1, w2, w3 = philox_words(token // 4, seed, sample, position, purpose)
    place = token % 4
    return tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
