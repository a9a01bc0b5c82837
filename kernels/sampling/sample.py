"""From logits to tokens: the draw, the best tokens of a row, and the distribution's normaliser. Top-k and top-p: keep_top.py.

    score of token v = logits[v] / T + G(seed, sample, position, v)      G: Gumbel noise of philox.py; T = 0: logits[v]

    sample_tokens   the token of the highest score (a draw from softmax(logits / T))           [M, V] -> [M]
    top_tokens      the `width` tokens of the highest scores, best first                       [M, V] -> [M, width]
    draw_tokens     the same for nodes of a draft, each with its own noise                  [L, B, V] -> [I, B, width]
    log_sum_exp     log(sum(exp(logits)))                                                      [M, V] -> fp32 [M]

Scores are fp32, the division is IEEE's. Ties go to the lowest token id; NaN counts as minus infinity. A drafter that ranks its own
logits with the target's seed, sample and position gets exactly the same noise. On a GPU the vocabulary is cut into chunks, so that
one row fills the card. Sums are over fixed chunks, in their order: a row's bits never depend on other rows.

Letters: M rows, V vocabulary, C chunks, W width; L distributions and I nodes of a draft, B requests.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from .best_token import best_token, key_of, load_noise_keys, load_scores, score_of, words_of
from .philox import DRAFT_NOISE, NUM_PURPOSES, TARGET_NOISE, gumbel, gumbel_of_word, salted

MAX_WIDTH = 64  # of top_tokens
KEPT_NOISE = 64  # rows of noise kept by noise_rows, the newest ones
_NOISE = {}
_CHUNK = 1024  # tokens per program where more than one token of a row is asked for
SUM_CHUNK = 4096  # tokens per partial sum: fixed, it orders the sums


def noise_rows(seed, sample, position, vocab_size):
    """Gumbel noise of rows, made once per (seed, sample, position).  three [M] -> fp32 [M, V]

    The newest rows are kept: nodes of one depth share a row, drafts share it with the target, and the next step asks for most
    positions again. For the CPU only, where the generator's many small operations cost a tenth of a small model's step.
    """
    keys = [(vocab_size, str(seed.device), *key) for key in zip(seed.tolist(), sample.tolist(), position.tolist())]
    missing = list(dict.fromkeys(key for key in keys if key not in _NOISE))
    if missing:
        made = torch.tensor([key[2:] for key in missing], device=seed.device)
        _NOISE.update(zip(missing, gumbel(*made.T, vocab_size)))
    rows = torch.stack([_NOISE[key] for key in keys])
    while len(_NOISE) > KEPT_NOISE:
        del _NOISE[next(iter(_NOISE))]
    return rows


def scores_reference(logits, temperature=None, seed=None, sample=None, position=None):
    """logits / T + G in fp32, NaN as minus infinity.  [M, V], four [M] -> [M, V]; temperature None: all 0"""
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    if temperature is None:
        return scores
    drawn = (temperature > 0).nonzero().squeeze(1)
    if drawn.numel():
        scores = scores.clone()
        noise = noise_rows(seed[drawn], sample[drawn], position[drawn], logits.shape[1])
        scores[drawn] = scores[drawn] / temperature[drawn].float()[:, None] + noise
    return scores


def top_tokens_reference(logits, width, temperature=None, seed=None, sample=None, position=None, with_scores=False):
    """The formula: repeated argmax where `width` is small, else a stable sort.  [M, V] -> [M, width]"""
    scores = scores_reference(logits, temperature, seed, sample, position)
    tokens = best_tokens(scores, width)
    return (tokens, scores.gather(1, tokens)) if with_scores else tokens


def best_tokens(scores, width):
    """The `width` tokens of the highest scores, best first.  [M, V] -> [M, width]"""
    if width > 16 or bool(((scores > -torch.inf).sum(1) < width).any()):
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    found = [scores.argmax(-1, keepdim=True)]
    for _ in range(width - 1):
        scores = scores.scatter(1, found[-1], -torch.inf)
        found.append(scores.argmax(-1, keepdim=True))
    return torch.cat(found, 1)


def draw_tokens_reference(scores, width, distributions, nodes, temperature, seed, sample, position):
    """The formula in plain torch."""
    noise = gumbel(seed, sample, position, scores.shape[-1], salted(DRAFT_NOISE, nodes)[:, None])  # [I, B, V]
    heat = temperature.float()[:, None]
    wide = scores_reference(scores.flatten(0, 1)).view(scores.shape)[distributions]
    wide = torch.where(heat > 0, wide / torch.where(heat > 0, heat, 1) + noise, wide).flatten(0, 1)
    tokens = best_tokens(wide, width)
    return tokens.masked_fill(wide.gather(1, tokens) == -torch.inf, -1).view(len(nodes), -1, width)


def log_sum_exp_reference(logits):
    """The formula in fp32, summed as a tree of halves: the order of a library sum may depend on the number of rows."""
    wide = logits.float()
    highest = wide.amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0, highest)
    terms = torch.exp(wide - highest)
    terms = torch.nn.functional.pad(terms, (0, (1 << (terms.shape[1] - 1).bit_length()) - terms.shape[1]))
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return (highest + torch.log(terms)).squeeze(1)


@jit
def _store_best(keys, out, WIDTH: tl.constexpr):
    """The WIDTH highest of `keys` (all different), best first."""
    lowest: tl.constexpr = -0x8000000000000000
    for i in range(WIDTH):
        best = tl.max(keys, 0)
        tl.store(out + i, best)
        keys = tl.where(keys == best, lowest, keys)


@jit(
    do_not_specialize=["num_chunks", "num_keys"],
    do_not_specialize_on_alignment=["temperature", "seed", "sample", "position"],
)
def _chunk_best(
    logits, token_ids, temperature, seed, sample, position, distributions, nodes, keys, size, num_chunks, num_keys,
    NOISE: tl.constexpr, PURPOSE: tl.constexpr, SALT: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The WIDTH best of one chunk of one row.  -> keys [M, C, WIDTH]"""
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < size
    token, source = column, row
    if token_ids is not None:
        token = tl.load(token_ids + column, mask=inside, other=0)
    if NOISE:
        source, heat, key = load_noise_keys(
            row, num_keys, temperature, seed, sample, position, distributions, nodes, PURPOSE, SALT
        )
    score = load_scores(logits + source * size, column, inside)
    if NOISE:  # noqa: SIM102  (known to the compiler)
        if heat > 0:
            words = words_of(token, token_ids, chunk * CHUNK, key, CHUNK)
            score = tl.div_rn(score, tl.full(score.shape, 1.0, tl.float32) * heat) + gumbel_of_word(words)
    _store_best(tl.where(inside, key_of(score, token), -0x8000000000000000), keys + pid.to(tl.int64) * WIDTH, WIDTH)


@jit
def _merge_best(keys, out, scores, count, WIDTH: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr):
    """The WIDTH best tokens of one row's keys [C * W]; EMPTY: -1 for a score of minus infinity.  -> out and, unless it is None,
    scores [M, WIDTH]"""
    lowest: tl.constexpr = -0x8000000000000000
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    found = tl.load(keys + row * count + i, mask=i < count, other=lowest)
    for rank in range(WIDTH):
        best = tl.max(found, 0)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        if EMPTY:
            token = tl.where((best >> 32) <= -0x7F800001, -1, token)  # the key of minus infinity
        tl.store(out + row * WIDTH + rank, token)
        if scores is not None:
            tl.store(scores + row * WIDTH + rank, score_of(best))
        found = tl.where(found == best, lowest, found)


@jit(do_not_specialize=["num_chunks"])
def _chunk_sums(logits, highest, sums, vocab_size, num_chunks, CHUNK: tl.constexpr):
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(highest + pid, top)
    tl.store(sums + pid, tl.sum(tl.exp(x - shift), 0))


@jit(do_not_specialize=["num_chunks"])
def _merge_sums(highest, sums, out, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < num_chunks
    tops = tl.load(highest + row * num_chunks + i, mask=inside, other=float("-inf"))
    parts = tl.load(sums + row * num_chunks + i, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tops = tl.where(tl.abs(tops) == float("inf"), 0.0, tops)
    # A chunk of minus infinities alone has the sum 0, and stays 0 whatever it is scaled by.
    scaled = tl.where(parts == 0.0, 0.0, parts * tl.exp(tops - shift))
    tl.store(out + row, shift + tl.log(tl.sum(scaled, 0)))


def sample_tokens(logits, temperature=None, seed=None, sample=None, position=None):
    """The token of the highest score of every row.  logits [M, V] -> int64 [M]

    temperature [M] (0: the likeliest token; None: 0 for all rows); seed, sample and position [M], integers that key the noise.
    Raises ValueError for shapes that do not fit.
    """
    if not on_triton(logits):
        check_rows("sample_tokens", logits, temperature, seed, sample, position)
        return scores_reference(logits, temperature, seed, sample, position).argmax(-1)
    return top_tokens(logits, 1, temperature, seed, sample, position).squeeze(1)


def top_tokens(
    logits, width, temperature=None, seed=None, sample=None, position=None, with_scores=False, token_ids=None
):
    """The `width` tokens of the highest scores of every row, best first.  logits [M, V] -> int64 [M, width]

    With with_scores, also returns those scores, fp32 [M, width]. The other arguments are those of sample_tokens, for all M rows, or
    for the first B of M = K B rows: then row k B + b is drawn with the noise of row b, k positions later (drafts of K depths).
    token_ids: int32 [V], all different, which tokens the logits are of (a draft vocabulary); None: each of its own column.
    Raises ValueError for shapes that do not fit and widths outside [1, MAX_WIDTH].
    """
    drawn = logits if temperature is None or not len(temperature) else logits[: len(temperature)]
    check_rows("top_tokens", drawn, temperature, seed, sample, position)
    rows, vocab_size = logits.shape
    if rows % max(len(drawn), 1):
        raise ValueError(f"top_tokens takes keys for all rows or for a whole part of them, got {len(drawn)} for {rows}")
    if not 1 <= width <= min(MAX_WIDTH, vocab_size):
        raise ValueError(f"top_tokens takes a width from 1 to {min(MAX_WIDTH, vocab_size)}, got {width}")
    if token_ids is not None and token_ids.shape != (vocab_size,):
        raise ValueError(f"top_tokens takes an id of each of {vocab_size} columns, got {tuple(token_ids.shape)}")
    if not on_triton(logits):
        if len(drawn) < rows:
            ahead = torch.arange(rows // len(drawn), device=logits.device)[:, None]
            temperature, seed, sample = (x.repeat(len(ahead)) for x in (temperature, seed, sample))
            position = (position + ahead).flatten()
        if token_ids is not None:
            some, ids = logits, token_ids.long()
            logits = some.new_full((rows, int(ids.max()) + 1), -torch.inf)
            logits[:, ids] = some
        return top_tokens_reference(logits, width, temperature, seed, sample, position, with_scores)
    noise = [None] * 4 if temperature is None else [x.contiguous() for x in (temperature, seed, sample, position)]
    scores = torch.empty(rows, width, device=logits.device) if with_scores else None
    found = launch_best(logits, rows, width, noise, None, None, len(drawn), TARGET_NOISE, scores, token_ids)
    return (found, scores) if with_scores else found


def draw_tokens(scores, width, distributions, nodes, temperature, seed, sample, position):
    """Draw without replacement for nodes of a draft: the best of log q + G, in order.  [L, B, V] -> int64 [I, B, width]

    distributions, nodes [I] integers: the distribution that a node draws from, and its number, which salts the noise. The other
    arguments [B] are those of sample_tokens; position is that of the step's root (philox.py, DRAFT_NOISE). Temperature 0: the
    likeliest tokens. The result is -1 where no token of finite score is left. Raises ValueError for shapes that do not fit and
    widths outside [1, MAX_WIDTH].
    """
    if scores.dim() != 3 or distributions.dim() != 1 or distributions.shape != nodes.shape:
        raise ValueError(
            f"draw_tokens takes scores [L, B, V], distributions and nodes [I], got "
            f"{[tuple(x.shape) for x in (scores, distributions, nodes)]}"
        )
    _, batch, vocab_size = scores.shape
    check_rows("draw_tokens", scores[0], temperature, seed, sample, position)
    if not 1 <= width <= min(MAX_WIDTH, vocab_size):
        raise ValueError(f"draw_tokens takes a width from 1 to {min(MAX_WIDTH, vocab_size)}, got {width}")
    if not on_triton(scores):
        return draw_tokens_reference(scores, width, distributions, nodes, temperature, seed, sample, position)
    noise = [x.contiguous() for x in (temperature, seed, sample, position)]
    found = launch_best(
        scores, len(nodes) * batch, width, noise, distributions.contiguous(), nodes.contiguous(), batch, DRAFT_NOISE
    )
    return found.view(len(nodes), batch, width)


def launch_best(logits, rows, width, noise, distributions, nodes, num_keys, purpose, scores=None, token_ids=None):
    """The two launches of top_tokens, or of draw_tokens where distributions and nodes are given.  -> int64 [rows, width]

    Fills `scores` if they are not None.
    """
    if width == 1:
        return best_token(logits, rows, noise, num_keys, purpose, distributions, nodes, scores, token_ids)[:, None]
    size = logits.shape[-1]
    chunks = triton.cdiv(size, _CHUNK)
    keys = torch.empty(rows, chunks * width, dtype=torch.int64, device=logits.device)
    found = torch.empty(rows, width, dtype=torch.int64, device=logits.device)
    if rows:
        salt = 0 if nodes is None else NUM_PURPOSES
        _chunk_best[(rows * chunks,)](
            logits.contiguous(), token_ids, *noise, distributions, nodes, keys, size, chunks, num_keys,
            noise[0] is not None, purpose, salt, width, _CHUNK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        block = triton.next_power_of_2(chunks * width)
        _merge_best[(rows,)](
            keys, found, scores, chunks * width, width, nodes is not None, block, num_warps=min(max(block // 256, 1), 8)
        )
    return found


def log_sum_exp(logits):
    """log(sum(exp(logits))) of every row.  [M, V] -> fp32 [M]; ValueError for another rank"""
    check_rows("log_sum_exp", logits)
    if not on_triton(logits):
        return log_sum_exp_reference(logits)
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, SUM_CHUNK)
    highest, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        logits = logits.contiguous()
        if logits.data_ptr() % 16 and vocab_size % 16 == 0:
            logits = logits.clone()  # alignment may change the compiled order of a sum
        _chunk_sums[(rows * chunks,)](
            logits, highest, sums, vocab_size, chunks, SUM_CHUNK, num_warps=4, enable_fp_fusion=False
        )
        _merge_sums[(rows,)](
            highest, sums, out, chunks, triton.next_power_of_2(chunks), num_warps=1, enable_fp_fusion=False
        )
    return out


def check_rows(op, logits, *per_row):
    """Raises ValueError unless logits are [M, V] and the rest are [M] (or all None)."""
    if logits.dim() != 2:
        raise ValueError(f"{op} takes logits [M, V], got {tuple(logits.shape)}")
    shapes = [None if x is None else tuple(x.shape) for x in per_row]
    if shapes and any(shape is not None for shape in shapes) and shapes != [(logits.shape[0],)] * len(shapes):
        raise ValueError(f"{op} takes one entry per row of logits {tuple(logits.shape)}, got {shapes}")
