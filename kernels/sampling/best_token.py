"""The best token of every row, by its logit or by a draw: two launches, of which the second takes exact scores.

    sample.py defines the scores: logits[v] / T + G(seed, sample, position, v), T = 0: logits[v]; ties go to the lowest token

The first finds the winner of each chunk of a row. Roughly computed, in fp32, a draw's noise takes a third of the time and nearly
always leaves one token that can win. The second takes the exact scores of these winners, a hundred to a row.

Letters: M rows, V vocabulary, C chunks; L distributions and I nodes of a draft, B requests.
"""

import torch

from ..jit import jit, tl, triton
from ..overlap import await_previous, overlap, release_next
from .philox import NUM_PURPOSES, ROUGHNESS, chunk_words, gumbel_of_word, rough_exponential, rough_log2, token_words

# Columns and warps of a program of the first launch, by the most rows. On an H100 both launches take, in microseconds, for 128,256
# tokens 3.7 (1 row), 10 (16), 21 (64) and 103 (384), greedily 2.6, 8.9 and 52 (1, 64, 384); for 32,000 with ids, which take four
# times the words, 3.7, 5.6 and 13 (64).
CHUNKS = {32: (1024, 4), 1 << 31: (2048, 4)}
CHUNKS_OF_IDS = {8: (512, 4), 1 << 31: (2048, 4)}


@jit
def key_of(score, token):
    """An int64 key that orders by score, then by the lower token; its low half holds the token."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@jit
def score_of(key):
    """The score of a key."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@jit
def load_scores(logits, at, mask):
    """Logits in fp32, NaN as minus infinity, which stands where the mask is false."""
    score = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@jit
def load_noise_keys(
    row, num_keys, temperature, seed, sample, position, distributions, nodes, PURPOSE: tl.constexpr, SALT: tl.constexpr
):
    """The row of its logits, temperature and what keys a row's noise: (seed, sample, position, purpose).

    All are loaded at once, also where the temperature is 0, so that the latencies overlap.
    """
    key, later = row % num_keys, row // num_keys
    heat = tl.load(temperature + key).to(tl.float32)
    seed_, sample_ = tl.load(seed + key).to(tl.int64), tl.load(sample + key).to(tl.int64)
    position_ = tl.load(position + key).to(tl.int64)
    if SALT:
        source = tl.load(distributions + later).to(tl.int64) * num_keys + key
        purpose = tl.load(nodes + later).to(tl.int64) * SALT + PURPOSE
    else:
        source, purpose, position_ = row, PURPOSE, position_ + later
    return source, heat, (seed_, sample_, position_, purpose)


@jit
def words_of(tokens, token_ids, start, key, COUNT: tl.constexpr):
    """Words of the tokens of COUNT columns from `start` on."""
    if token_ids is None:
        return chunk_words(start, *key, COUNT)
    else:
        return token_words(tokens, *key)


@jit
def _place_of_best(score, token, token_ids, i, inside):
    """The place i of the highest score, of the lowest token among equals."""
    is_best = inside & (score == tl.max(score, 0))
    if token_ids is not None:  # ids are in any order
        is_best = is_best & (token == tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0))
    return tl.min(tl.where(is_best, i, 0x7FFFFFFF), 0)


@jit(
    do_not_specialize=["num_chunks", "num_keys"],
    do_not_specialize_on_alignment=["temperature", "seed", "sample", "position"],
)
def _chunk_winner(
    logits, token_ids, temperature, seed, sample, position, distributions, nodes, winners, size, num_chunks, num_keys,
    NOISE: tl.constexpr, PURPOSE: tl.constexpr, SALT: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The column of the best token of one chunk of one row.  -> winners int32 [M, C]

    With words drawn at two places the compiler draws all of them twice: they are drawn where they are used.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, CHUNK)
    column = chunk * CHUNK + i
    inside = column < size
    token = column
    await_previous(OVERLAP)
    release_next(OVERLAP)
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=inside, other=0x7FFFFFFF)
    source, heat = row, 0.0
    if NOISE:
        source, heat, key = load_noise_keys(
            row, num_keys, temperature, seed, sample, position, distributions, nodes, PURPOSE, SALT
        )
    score = load_scores(logits + source * size, column, inside)
    place = 0
    if NOISE:
        if heat > 0:
            words = words_of(token, token_ids, chunk * CHUNK, key, CHUNK)
            rough = tl.fma(score, 1.4426950408889634 / heat, -rough_log2(rough_exponential(words)))
            best = tl.max(rough, 0)
            # Twice what a token's value may be off, in halvings: by the roughness, and by rounding, here and in the score itself.
            near = rough >= best - (1.4426950408889634 * 4 * ROUGHNESS + 5e-5 + tl.abs(best) * 1e-6)
            found = tl.sum(tl.where(near, i + CHUNK, 0), 0)
            if (found // CHUNK == 1) & (heat > 1e-30):
                place = found - CHUNK
            elif tl.max(score, 0) == float("-inf"):  # nothing can be drawn, as where a grammar forbids a chunk
                place = _place_of_best(score, token, token_ids, i, inside)
            else:
                again = words_of(token, token_ids, chunk * CHUNK, key, CHUNK)
                exact = tl.div_rn(score, tl.full(score.shape, 1.0, tl.float32) * heat) + gumbel_of_word(again)
                place = _place_of_best(exact, token, token_ids, i, inside)
        else:
            place = _place_of_best(score, token, token_ids, i, inside)
    else:
        place = _place_of_best(score, token, token_ids, i, inside)
    tl.store(winners + row * num_chunks + chunk, chunk * CHUNK + place)


@jit(
    do_not_specialize=["num_chunks", "num_keys"],
    do_not_specialize_on_alignment=["temperature", "seed", "sample", "position"],
)
def _best_winner(
    logits, token_ids, temperature, seed, sample, position, distributions, nodes, winners, out, scores, size,
    num_chunks, num_keys,
    NOISE: tl.constexpr, PURPOSE: tl.constexpr, SALT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best of one row's winners.  -> out and, unless it is None, scores [M]; with SALT, -1 for a score of minus infinity"""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < num_chunks
    await_previous(OVERLAP)
    release_next(OVERLAP)
    column = tl.load(winners + row * num_chunks + i, mask=inside, other=0)
    token = column
    if token_ids is not None:
        token = tl.load(token_ids + column)
    source = row
    if NOISE:
        source, heat, key = load_noise_keys(
            row, num_keys, temperature, seed, sample, position, distributions, nodes, PURPOSE, SALT
        )
    score = load_scores(logits + source * size, column, inside)
    if NOISE:  # noqa: SIM102  (known to the compiler)
        if heat > 0:
            words = token_words(token, *key)
            score = tl.div_rn(score, tl.full(score.shape, 1.0, tl.float32) * heat) + gumbel_of_word(words)
    best = tl.max(tl.where(inside, key_of(score, token), -0x8000000000000000), 0)
    found = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    if SALT:
        found = tl.where((best >> 32) <= -0x7F800001, -1, found)  # the key of minus infinity
    tl.store(out + row, found)
    if scores is not None:
        tl.store(scores + row, score_of(best))


def best_token(logits, rows, noise, num_keys, purpose, distributions=None, nodes=None, scores=None, token_ids=None):
    """The two launches.  logits [.., V] -> int64 [rows]

    noise: temperature, seed, sample, position [B], or four None; row k B + b has the noise of row b, k positions later. With
    distributions and nodes [I], row i B + b is node i's of request b, and -1 where no token has a finite score. Fills `scores`
    [rows] if they are not None. token_ids: int32 [V], the tokens of the columns, all different; None: columns are tokens.
    """
    size = logits.shape[-1]
    sizes = CHUNKS if token_ids is None else CHUNKS_OF_IDS
    chunk, warps = next(one for most, one in sizes.items() if rows <= most)
    chunks = triton.cdiv(size, chunk)
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        logits = logits.contiguous()
        salt = 0 if nodes is None else NUM_PURPOSES
        drawn = noise[0] is not None, purpose, salt
        _chunk_winner[rows, chunks](
            logits, token_ids, *noise, distributions, nodes, winners, size, chunks, num_keys, *drawn, chunk,
            num_warps=warps, enable_fp_fusion=False, **overlap(logits),
        )  # fmt: skip
        _best_winner[(rows,)](
            logits, token_ids, *noise, distributions, nodes, winners, found, scores, size, chunks, num_keys, *drawn,
            triton.next_power_of_2(chunks), num_warps=4, enable_fp_fusion=False, **overlap(logits),
        )  # fmt: skip
    return found
