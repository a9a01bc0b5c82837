"""How each product is cut and launched: splits of K by (N, K), and tiles by (N, K) and rows.

    num_splits(N, K) -> S            decides bits: ranges of K are summed apart and added in order. Never looks at rows.
    decode_launch(N, K, tile_rows)   decides speed only: up to DECODE_ROWS rows, weights read once.
    prefill_launch(N, K, S, rows)    decides speed only: more rows.
    fit_decode, fit_prefill          a launch with the stages and features that fit a GPU's shared memory; its depth stays.

Entries were measured on an H200 (`headstart bench kernel linear --shape ... --sweep` prints the winner of a new shape).
Changing a number of splits changes the bits of every output; changing a launch changes none.
"""

from typing import NamedTuple

from ..shared_memory import H200, most_stages

DECODE_ROWS = 128  # the widest row tile of the decode kernel: up to here every weight is read once
# 80 and 96 are a tile of 64 and one of 16 or 32 on the same weights: less to multiply than 128, so cooler too.
ROW_TILES = (16, 32, 64, 80, 96, DECODE_ROWS)
SPLIT_ALIGNMENT = 128  # ranges of K end at multiples of this, so that every depth of tile gives the same partial sums


class Launch(NamedTuple):
    """Tile of output features, depth of a tile in K, stages of the load pipeline, warps."""

    features: int
    depth: int
    stages: int
    warps: int


MULTIPROCESSORS = 132  # of an H200
FLOAT32 = Launch(64, 32, 2, 4)  # no tensor cores: one launch for every product, whose depth is part of the sums


class PrefillLaunch(NamedTuple):
    """Tile of rows, of output features, depth in K, stages, warps, row tiles that walk the features together."""

    rows: int
    features: int
    depth: int
    stages: int
    warps: int
    group: int
    apart: bool = False  # ranges of K are programs of their own; else one program sums all of a tile's ranges
    handover: bool = False  # one program begins a tile that another one ends; ranges are apart

    @property
    def in_halves(self):
        """Whether the row tile is two powers of two on the same weights: then the decode kernel takes it, weights on the left."""
        return halves_of_tile(self.rows)[1] > 0 and not self.handover


# The tiles of many rows, and the nanoseconds that a multiprocessor of an H200 takes for 64 of K. Up to 16 row tiles walk the
# features together, so the weights of 2,048 rows are read once: gate and up of 1,152 and 1,408 rows take 3 % less than in groups
# of 8 (under load), where the last one or three row tiles read all weights again.
PREFILL_TILES = {
    PrefillLaunch(128, 256, 64, 4, 8, 16): 690,
    PrefillLaunch(128, 128, 64, 6, 4, 16): 380,
    PrefillLaunch(64, 256, 64, 5, 4, 16): 385,
    PrefillLaunch(160, 128, 64, 6, 4, 1): 480,
    PrefillLaunch(192, 128, 64, 5, 4, 1): 540,
}
# The tile of a program that sums all ranges of K: its scratch leaves room for three stages.
SECOND_RANGE = PrefillLaunch(128, 256, 64, 3, 8, 16)
SECOND_RANGE_STEP = 700  # nanoseconds, as above

# Where programs hand over sums (linear_handover.py), by the first and the last number of rows. An 8B under load, microseconds
# before and after: gate and up of 192 rows 110 and 93, of 320 152 and 139, of 384 166 and 160, of 768 346 and 273; qkv of 512 rows
# 49 and 47, of 768 75 and 68. On an H100: down of 1,280 rows 292 and 246; gate and up of 640 rows in a layer 238 and 223, but 367
# by tiles of 64 x 256, which alone take 270. Nothing gained for gate and up at 256, 512 and 1000 rows, nor in `out`, the lm_head
# and `down` of other rows: as the power is the limit (700 W), multiprocessors that idle in the last wave cost little.
HANDOVER = {
    (28672, 4096): {
        (161, 192): PrefillLaunch(192, 128, 64, 5, 4, 1, True, True),
        (257, 320): PrefillLaunch(64, 256, 64, 5, 4, 1, True, True),
        (321, 384): PrefillLaunch(128, 256, 64, 4, 8, 1, True, True),
        (577, 640): PrefillLaunch(128, 256, 64, 4, 8, 1, True, True),
        (641, 768): PrefillLaunch(256, 128, 64, 4, 8, 1, True, True),
    },
    (6144, 4096): {
        (449, 512): PrefillLaunch(64, 256, 64, 5, 4, 1, True, True),
        (705, 768): PrefillLaunch(64, 256, 64, 5, 4, 1, True, True),
    },
    (4096, 14336): {(1153, 1280): PrefillLaunch(128, 256, 64, 4, 8, 1, True, True)},
}

SPLITS = {(6144, 4096): 1, (4096, 4096): 2, (28672, 4096): 1, (4096, 14336): 2, (128256, 4096): 1, (16384, 4096): 1}

# Products with fewer tiles of 64 features than there are multiprocessors, by the most rows: o, down and qkv of an 8B on two ranks.
FEW_TILES = {
    32: Launch(64, 128, 8, 4),
    64: Launch(64, 128, 6, 4),
    96: Launch(64, 128, 5, 4),
    DECODE_ROWS: Launch(64, 64, 8, 4),
}

DECODE = {
    (6144, 4096): {
        16: Launch(64, 128, 6, 4),
        32: Launch(64, 128, 6, 4),
        64: Launch(64, 128, 6, 4),
        80: Launch(64, 128, 5, 4),
        96: Launch(64, 128, 5, 4),
        128: Launch(64, 64, 8, 4),
    },
    (4096, 14336): {
        16: Launch(64, 128, 6, 4),
        32: Launch(64, 128, 4, 4),
        64: Launch(64, 128, 6, 4),
        80: Launch(64, 128, 5, 4),
        96: Launch(64, 128, 5, 4),
        128: Launch(64, 128, 4, 4),
    },
    (128256, 4096): {
        16: Launch(128, 128, 4, 4),
        32: Launch(128, 128, 4, 8),
        64: Launch(128, 128, 4, 8),
        80: Launch(128, 128, 4, 4),
        96: Launch(128, 64, 6, 4),
        128: Launch(128, 64, 3, 8),
    },
    (16384, 4096): {
        16: Launch(64, 128, 4, 4),
        32: Launch(128, 128, 4, 8),
        64: Launch(128, 128, 4, 4),
        128: Launch(128, 64, 6, 8),
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
    }
}


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
    """A row tile as the powers of two that matrix instructions take: (64, 16), (128, 64) ..., (rows, 0) if it is one itself."""
    half = 1 << (rows.bit_length() - 1)
    return half, rows - half


def decode_launch(N, K, rows, itemsize=2, splits=None):
    """Launch of linear's decode kernel for a row tile of `rows` (see tile_rows).  splits: ranges of K, None: num_splits(N, K)"""
    if itemsize > 2:
        return FLOAT32
    splits = splits or num_splits(N, K)
    if rows in DECODE.get((N, K), {}) and splits == num_splits(N, K):
        return DECODE[N, K][rows]
    # What the measured shapes have in common: few tiles are fastest with deep pipelines, many tiles when they are large.
    programs = -(-N // 64) * splits
    if splits == 1 and programs <= MULTIPROCESSORS:  # as some are idle, the others load more at a time
        return next(launch for most, launch in FEW_TILES.items() if rows <= most)
    few = programs <= 264
    if rows < 128:
        if rows > 64:
            return Launch(64, 128, 5, 4) if few else Launch(128, 64, 6, 4)
        return Launch(64, 128, 4, 4) if few else Launch(128, 128, 4, 4 if rows == 16 else 8)
    return Launch(64, 128, 4, 4) if few else Launch(128, 64, 6, 8)


def fit_decode(launch, rows, memory, operands=1, itemsize=2):
    """The launch with as many of its stages as fit into `memory` (SharedMemory), and fewer features where two would not fit.

    operands: tiles of weights that a program loads at a time. The depth stays: in float32 it decides bits.
    """
    while True:
        tile = (launch.features * operands + rows) * launch.depth * itemsize
        stages = min(launch.stages, most_stages(memory, tile))
        if stages >= min(launch.stages, 2 + memory.held) or launch.features <= 16:
            return launch._replace(stages=max(stages, 1))
        launch = launch._replace(features=launch.features // 2)


def fit_prefill(launch, S, memory):
    """The prefill launch with as many of its stages as fit into `memory` (SharedMemory); None where two would not fit.

    Beside the stages lies a piece of the tile on its way out: 128 features in 16 bits, or 64 in float32, and once more in 16 bits
    where the program sums all ranges. The decode kernel, which takes tiles in halves, has none.
    """
    piece = 0 if launch.in_halves else launch.rows * (256 if S == 1 or launch.apart else 384)
    stages = min(launch.stages, most_stages(memory, (launch.rows + launch.features) * launch.depth * 2, piece))
    return launch._replace(stages=stages) if stages >= 2 + memory.held else None


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
    return Launch(64, 64, 4, 8) if I < 8192 else Launch(128, 64, 4, 8)


def prefill_launch(N, K, S, rows, programs, memory=H200, late=False):
    """Launch of linear's prefill kernel for w [N, K] in S ranges and `rows` rows, on `programs` multiprocessors.

    The one whose waves of tiles take least: at 320 rows a product of 4096 features has 48 tiles of 128 x 256 for 132
    multiprocessors, 96 if its two ranges are apart, and 128 tiles of 160 x 128, which multiply no row in vain.
    On a GPU like the H200 some products hand over sums instead (HANDOVER), unless they are late: beside another one (linear.py).
    """
    if not late and num_splits(N, K) == S and (programs, memory) == (MULTIPROCESSORS, H200):
        for (first, last), launch in HANDOVER.get((N, K), {}).items():
            if first <= rows <= last:
                return launch
    if S == 1:
        times = {launch: _time_of_waves(launch, N, K, 1, rows, programs) for launch in PREFILL_TILES}
    else:
        # Ranges apart write and read fp32 sums, 8 bytes per feature, row and range, at about 4 bytes a picosecond.
        apart = [launch._replace(apart=True) for launch in PREFILL_TILES]
        times = {SECOND_RANGE: S * _time_of_waves(SECOND_RANGE, N, K / S, 1, rows, programs)}
        times |= {launch: _time_of_waves(launch, N, K, S, rows, programs) + rows * N * S * 2e-3 for launch in apart}
    fitting = {fit_prefill(launch, S, memory): time for launch, time in times.items()}
    fitting.pop(None, None)
    return min(fitting, key=fitting.get)


def gated_prefill_launch(I, K, rows, programs, memory=H200):
    """Launch of gate_up_silu's prefill kernel; `features` as in gated_launch."""
    launch = prefill_launch(2 * I, K, 1, rows, programs, memory)
    # Few stages leave room for a second program beside.
    return launch._replace(
        features=launch.features // 2, stages=min(launch.stages, 3) if launch.in_halves else launch.stages
    )


def launch_of_rows(N, K, rows, programs, memory=H200, splits=None):
    """What distinguishes the launches of a product [N, K] at one number of rows from those at another.

    splits: ranges of K, None: num_splits(N, K)
    """
    if rows <= DECODE_ROWS:
        return tile_rows(rows)
    return prefill_launch(N, K, splits or num_splits(N, K), rows, programs, memory)


def num_shares(launch, N, S, rows, programs):
    """Shares into which a handover launch cuts the tiles of a row tile, each a tile at least; 0: there are too many row tiles."""
    return min(programs // -(-rows // launch.rows), -(-N // launch.features) * S)


def _time_of_waves(launch, N, K, S, rows, programs):
    """Nanoseconds that the tiles of a product take, as many at a time as there are programs."""
    waves = -(-(-(-rows // launch.rows) * -(-N // launch.features) * S) // programs)
    step = PREFILL_TILES.get(launch._replace(apart=False), SECOND_RANGE_STEP)
    return waves * (K / S / 64 * step + 2000)
