"""How each product is cut and launched: splits of K by (N, K), and tiles by (N, K) and rows.

    num_splits(N, K) -> S            decides bits: ranges of K are summed apart and added in order. Never looks at rows.
    decode_launch(N, K, tile_rows)   decides speed only: up to DECODE_ROWS rows, weights read once.
    prefill_launch(N, K)             decides speed only: more rows.

Entries were measured on an H200 (`headstart bench kernel linear --shape ... --sweep` prints the winner of a new shape).
Changing a number of splits changes the bits of every output; changing a launch changes none.
"""

from typing import NamedTuple

DECODE_ROWS = 256  # the widest row tile of the decode kernel: up to here every weight is read once
# 80 and 96 are a tile of 64 and one of 16 or 32 on the same weights: less to multiply than 128, so cooler too.
ROW_TILES = (16, 32, 64, 80, 96, 128, DECODE_ROWS)
SPLIT_ALIGNMENT = 128  # ranges of K end at multiples of this, so that every depth of tile gives the same partial sums


class Launch(NamedTuple):
    """Tile of output features, depth of a tile in K, stages of the load pipeline, warps."""

    features: int
    depth: int
    stages: int
    warps: int


FLOAT32 = Launch(64, 32, 2, 4)  # no tensor cores: one launch for every product, whose depth is part of the sums


class PrefillLaunch(NamedTuple):
    """Tile of rows, of output features, depth in K, stages, warps, row tiles that walk the features together."""

    rows: int
    features: int
    depth: int
    stages: int
    warps: int
    group: int


SPLITS = {(6144, 4096): 1, (4096, 4096): 2, (28672, 4096): 1, (4096, 14336): 2, (128256, 4096): 1, (16384, 4096): 1}

DECODE = {
    (6144, 4096): {
        16: Launch(64, 128, 6, 4),
        32: Launch(64, 128, 6, 4),
        64: Launch(64, 128, 6, 4),
        80: Launch(64, 128, 5, 4),
        96: Launch(64, 128, 5, 4),
        128: Launch(64, 64, 8, 4),
        256: Launch(64, 64, 4, 8),
    },
    (4096, 14336): {
        16: Launch(64, 128, 6, 4),
        32: Launch(64, 128, 4, 4),
        64: Launch(64, 128, 6, 4),
        80: Launch(64, 128, 5, 4),
        96: Launch(64, 128, 5, 4),
        128: Launch(64, 128, 4, 4),
        256: Launch(64, 64, 4, 8),
    },
    (128256, 4096): {
        16: Launch(128, 128, 4, 4),
        32: Launch(128, 128, 4, 8),
        64: Launch(128, 128, 4, 8),
        80: Launch(128, 128, 4, 4),
        96: Launch(128, 64, 6, 4),
        128: Launch(128, 64, 3, 8),
        256: Launch(128, 64, 4, 8),
    },
    (16384, 4096): {
        16: Launch(64, 128, 4, 4),
        32: Launch(128, 128, 4, 8),
        64: Launch(128, 128, 4, 4),
        128: Launch(128, 64, 6, 8),
        256: Launch(128, 64, 4, 8),
    },
}

# gate_up_silu, by (I, K)
GATED_DECODE = {
    (14336, 4096): {
        16: Launch(64, 128, 3, 4),
        32: Launch(128, 128, 3, 8),
        64: Launch(128, 64, 4, 8),
        80: Launch(64, 64, 4, 4),
        96: Launch(64, 64, 4, 4),
        128: Launch(128, 64, 4, 8),
        256: Launch(64, 64, 4, 8),
    }
}

PREFILL = {}

GATED_PREFILL = {}


def num_splits(N, K):
    """S, the number of ranges of K into which the product of w [N, K] is cut. Depends on the weight's shape alone."""
    if (N, K) in SPLITS:
        return SPLITS[N, K]
    # One row fills 132 multiprocessors with about two tiles of 64 features each; a range stays at least 1024 deep.
    tiles = -(-N // 64)
    splits = 1
    while splits < 4 and tiles * splits < 160 and 2048 * splits <= K:
        splits *= 2
    return splits


def split_depth(K, splits):
    """The length of every range of K but the last, a multiple of SPLIT_ALIGNMENT (K itself if there is one range)."""
    return K if splits == 1 else -(-K // (splits * SPLIT_ALIGNMENT)) * SPLIT_ALIGNMENT


def tile_rows(num_rows, itemsize=2):
    """The decode kernel's row tile: the narrowest of ROW_TILES that holds the rows (64 at most in float32)."""
    most = DECODE_ROWS if itemsize == 2 else 64
    return next(rows for rows in ROW_TILES if rows >= min(num_rows, most))


def halves_of_tile(rows):
    """A row tile as the powers of two that matrix instructions take: (64, 16), (64, 32), else (rows, 0)."""
    return (64, rows - 64) if 64 < rows < 128 else (rows, 0)


def decode_launch(N, K, rows, itemsize=2):
    """Launch of linear's decode kernel for a row tile of `rows` (see tile_rows)."""
    if itemsize > 2:
        return FLOAT32
    if rows in DECODE.get((N, K), {}):
        return DECODE[N, K][rows]
    # What the measured shapes have in common: few tiles are fastest with deep pipelines, many tiles when they are large.
    few = -(-N // 64) * num_splits(N, K) <= 264
    if rows < 128:
        if rows > 64:
            return Launch(64, 128, 5, 4) if few else Launch(128, 64, 6, 4)
        return Launch(64, 128, 4, 4) if few else Launch(128, 128, 4, 4 if rows == 16 else 8)
    if rows == 128:
        return Launch(64, 128, 4, 4) if few else Launch(128, 64, 6, 8)
    return Launch(64, 64, 4, 8) if few else Launch(128, 64, 4, 8)


def gated_launch(I, K, rows, itemsize=2):
    """Launch of gate_up_silu's decode kernel; `features` counts the gate's features, and there are as many of up."""
    if itemsize > 2:
        return FLOAT32
    if rows in GATED_DECODE.get((I, K), {}):
        return GATED_DECODE[I, K][rows]
    if rows <= 32:
        return Launch(64, 128, 3, 4)
    if 64 < rows < 128:
        return Launch(64, 64, 4, 4)
    return Launch(64, 64, 4, 8) if rows == 256 or I < 8192 else Launch(128, 64, 4, 8)


def prefill_launch(N, K):
    """Launch of linear's prefill kernel."""
    one_range = PrefillLaunch(128, 256, 64, 4, 8, 8)
    return PREFILL.get((N, K), one_range if num_splits(N, K) == 1 else one_range._replace(stages=3))


def gated_prefill_launch(I, K):
    """Launch of gate_up_silu's prefill kernel; `features` as in gated_launch."""
    return GATED_PREFILL.get((I, K), PrefillLaunch(128, 128, 64, 4, 8, 8))
