"""Products with weights of 8 bits, for drafters: y = x W^T + b, where row n of W is scale[n] times codes in e4m3.

    x [M, K] bfloat16 or float16, w: Float8Weight of codes [N, K] and scale [N], b [N] or None
    float8_linear        ->  [M, N]
    float8_parts         ->  [M, N] in parts over S ranges of K, [S, M, N], as linear_parts gives them
    float8_gate_up_silu  ->  [M, I] of w of 2 I rows, as gate_up_silu gives it

Codes are read, half the bytes of bfloat16, and multiplied in the dtype of the rows; the scale comes last. Sums are those of
linear.py: one order for each (N, K), so a row's bits do not depend on the other rows. The target's own products never come here:
what it says does not change with its drafts.

e4m3 (FP8 Formats for Deep Learning, arXiv 2209.05433) has a sign, 4 bits of exponent and 3 of mantissa. A code's bits at the places
of a wider format are its value times a power of two, 2^-120 in bfloat16 and 2^-8 in float16, subnormal ones included.
In matrix instructions four threads share sixteen columns: thread t (0 to 3) has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. For
Hopper codes lie in that order, so a thread's four codes are one word. For other GPUs they lie by column: on Ampere and on consumer
GPUs up to Blackwell the compiler gives out columns by the width of a code, four in a row.
Not supported: float32 rows on a GPU.
"""

from dataclasses import dataclass

import torch

from ..jit import jit, on_triton, tl, triton
from ..overlap import await_previous, has_tensor_maps, overlap, release_next
from ..shared_memory import most_stages, shared_memory
from ..silu_mul import silu_mul, silu_mul_reference, silu_product
from .linear import add_parts, check_product, empty_rows, maps_of_rows
from .linear_prefill import TensorDescriptor
from .linear_table import DECODE_ROWS, Launch, num_splits, split_depth

_LARGEST = 448.0  # of e4m3
_ROWS_AT_ONCE = 8192  # of a weight that are rounded together
_UNSCALED = {torch.bfloat16: 2.0**120, torch.float16: 2.0**8}


def _four_codes(places, mask):
    """PTX that widens four codes: each goes to the upper byte of 16 bits, its exponent and mantissa then `places` down."""
    return tl.constexpr(
        f"""{{ .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
        shr.b32 c, a, {places}; and.b32 c, c, {mask:#x}; lop3.b32 $0, a, 0x80008000, c, 0xEA;
        shr.b32 d, b, {places}; and.b32 d, d, {mask:#x}; lop3.b32 $1, b, 0x80008000, d, 0xEA; }}"""
    )


_FOUR_TO_BFLOAT16, _FOUR_TO_FLOAT16 = _four_codes(4, 0x07F007F0), _four_codes(1, 0x3F803F80)


def prefers_thread_order(device, K):
    """Whether codes of rows of K lie in the order of threads on this device: on Hopper, if K is a multiple of 16."""
    return has_tensor_maps(device) and torch.cuda.get_device_capability(device)[0] == 9 and K % 16 == 0


def to_threads(codes):
    """Codes by column -> in the order of threads: of each sixteen columns 0, 1, 8, 9, then 2, 3, 10, 11 and so on  [N, K]"""
    return codes.view(len(codes), -1, 2, 4, 2).transpose(2, 3).reshape(codes.shape)


def to_columns(codes):
    """Codes in the order of threads -> by column  [N, K]"""
    return codes.view(len(codes), -1, 4, 2, 2).transpose(2, 3).reshape(codes.shape)


@dataclass(frozen=True)
class Float8Weight:
    """A weight [N, K] as e4m3 codes with a scale for each row."""

    codes: torch.Tensor  # uint8 [N, K]
    scale: torch.Tensor  # float32 [N]
    by_thread: bool = False  # codes lie in the order of threads, not of columns

    @classmethod
    @torch.no_grad()  # a parameter's graph would keep the weight in float32
    def of(cls, weight):
        """The nearest codes of a weight [N, K]; the largest value of a row becomes 448."""
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        by_thread = prefers_thread_order(weight.device, weight.shape[1])
        for some in (slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(weight), _ROWS_AT_ONCE)):
            wide = weight[some].float()
            scale[some] = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
            nearest = (wide / scale[some, None]).to(torch.float8_e4m3fn).view(torch.uint8)
            codes[some] = to_threads(nearest) if by_thread else nearest
        return cls(codes, scale, by_thread)

    def widened(self, dtype):
        """The values, rounded to `dtype`.  -> [N, K]"""
        codes = to_columns(self.codes) if self.by_thread else self.codes
        return (codes.view(torch.float8_e4m3fn).float() * self.scale[:, None]).to(dtype)

    @property
    def shape(self):
        """(N, K)"""
        return self.codes.shape

    @property
    def nbytes(self):
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def dim(self):
        """2, as a tensor says it."""
        return self.codes.dim()


def float8_linear_reference(x, w, b=None):
    """The formula in plain torch, any dtype.  [M, K], Float8Weight [N, K] -> [M, N]"""
    return torch.nn.functional.linear(x, w.widened(x.dtype), b)


@jit
def _widen(codes, DTYPE: tl.constexpr, PACKED: tl.constexpr, BY_THREAD: tl.constexpr):
    """Values of codes, by column, times 2^-120 in bfloat16 or 2^-8 in float16. PACKED: four codes by eight instructions.

    BY_THREAD: codes come in the order of threads
    """
    if PACKED:
        wide = tl.inline_asm_elementwise(
            _FOUR_TO_BFLOAT16 if tl.bfloat16 == DTYPE else _FOUR_TO_FLOAT16,
            "=r,=r,r", [codes], dtype=tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        bits = codes.to(tl.uint16)
        places: tl.constexpr = 4 if tl.bfloat16 == DTYPE else 7
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << places)).to(DTYPE, bitcast=True)
    if BY_THREAD:
        N: tl.constexpr = codes.shape[0]
        depth: tl.constexpr = codes.shape[1]
        wide = wide.reshape(N, depth // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(N, depth)
    return wide


@jit
def _range_product(
    x, w, row, feature, num_rows, start, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MAPS: tl.constexpr, PACKED: tl.constexpr,
    BY_THREAD: tl.constexpr,
):  # fmt: skip
    """Sums over the range of K from `start`, without scales.  -> [BLOCK_N, BLOCK_M]"""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if MAPS:
        for k in range(start, start + SPLIT, BLOCK_K):
            acc = tl.dot(_widen(w.load([feature, k]), DTYPE, PACKED, BY_THREAD), x.load([row, k]).T, acc)
    else:
        i, features, rows = tl.arange(0, BLOCK_K), feature + tl.arange(0, BLOCK_N), row + tl.arange(0, BLOCK_M)
        for k in range(0, SPLIT, BLOCK_K):
            depths = start + k + i
            inside = (depths < K) & (k + i < SPLIT)
            at = features.to(tl.int64)[:, None] * K + depths[None, :]
            codes = tl.load(w + at, mask=(features < N)[:, None] & inside[None, :], other=0)
            at = rows.to(tl.int64)[None, :] * K + depths[:, None]
            values = tl.load(x + at, mask=(rows < num_rows)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(_widen(codes, DTYPE, PACKED, BY_THREAD), values, acc)
    return acc


@jit
def _scaled(acc, scale, b, features, inside, UNSCALED: tl.constexpr):
    """Sums times the scales of their features, and the bias. Two factors: their product may be beyond float32."""
    acc = acc * UNSCALED * tl.load(scale + features, mask=inside, other=0.0)[:, None]
    if b is not None:
        acc += tl.load(b + features, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc


@jit(do_not_specialize=["num_rows"])
def _float8(
    x, w, scale, b, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, UNSCALED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MAPS: tl.constexpr, PACKED: tl.constexpr,
    BY_THREAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M] of one range of K, weights on the left (see linear.py).  -> out [S, M, N]

    x and w are tensor maps with MAPS, else pointers. GATED: N counts the gate's features, those of up follow; out [M, N]
    """
    row, feature, part = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    features, rows = feature + tl.arange(0, BLOCK_N), row + tl.arange(0, BLOCK_M)
    inside = features < N
    mask = inside[:, None] & (rows < num_rows)[None, :]
    await_previous(OVERLAP)
    if GATED:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            values = x.load([row, k]).T
            gate = tl.dot(_widen(w.load([feature, k]), DTYPE, PACKED, BY_THREAD), values, gate)
            up = tl.dot(_widen(w.load([N + feature, k]), DTYPE, PACKED, BY_THREAD), values, up)
        release_next(OVERLAP)
        gate = _scaled(gate, scale, b, features, inside, UNSCALED)
        up = _scaled(up, scale + N, None if b is None else b + N, features, inside, UNSCALED)
        y = silu_product(gate, up, out.dtype.element_ty)
    else:
        acc = _range_product(
            x, w, row, feature, num_rows, part * SPLIT, N, K, SPLIT, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, MAPS, PACKED,
            BY_THREAD,
        )  # fmt: skip
        release_next(OVERLAP)
        acc = _scaled(acc, scale, None, features, inside, UNSCALED)
        if b is not None:  # noqa: SIM102  (a condition of the compiler's, then one of the program's)
            if part == 0:
                acc += tl.load(b + features, mask=inside, other=0.0).to(tl.float32)[:, None]
        y = acc.to(out.dtype.element_ty)
    place = (part.to(tl.int64) * num_rows + rows)[None, :] * N + features[:, None]
    tl.store(out + place, y, mask=mask)


def float8_launch(N, K, S, rows, memory, gated=False):
    """Launch for a row tile of `rows`, which changes no bit. An H100's fastest of 8B shapes: few tiles deep, many tiles large."""
    few = -(-N // 64) * S <= 264
    launch = Launch(64, 128, 3, 4) if gated else Launch(64, 256, 6, 4) if few else Launch(128, 256, 3, 4)
    if launch.depth == 256 and (rows > (64 if few else 32) or split_depth(K, S) % 256):
        launch = launch._replace(depth=128)
    while True:
        stages = min(launch.stages, most_stages(memory, (launch.features * (1 + gated) + 2 * rows) * launch.depth))
        if stages >= 2 + memory.held or launch.depth == 64:
            return launch._replace(stages=max(stages, 1))
        launch = launch._replace(depth=launch.depth // 2)


def _maps_fit(x, w):
    """Whether tensor maps can describe rows and codes: rows of whole 16 bytes. Never on a GPU without tensor maps."""
    aligned = w.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0 and w.codes.data_ptr() % 16 == 0
    return aligned and (not x.is_cuda or has_tensor_maps(x.device))


def _launch(x, w, b, out, S, gated=False):
    """Launch the kernel into out [S, M, N], or with `gated` into out [1, M, I]."""
    (M, K), N, maps = x.shape, w.shape[0] // (1 + gated), _maps_fit(x, w)
    rows = max(16, triton.next_power_of_2(min(M, DECODE_ROWS)))
    launch = float8_launch(N, K, S, rows, shared_memory(x.device), gated)
    codes, dtype, unscaled, packed = w.codes, x.dtype, _UNSCALED[x.dtype], x.is_cuda and torch.version.hip is None
    if maps:
        codes = TensorDescriptor.from_tensor(codes, [launch.features, launch.depth])
        x, _ = maps_of_rows(x, rows, launch.depth)
    _float8[(triton.cdiv(M, rows), triton.cdiv(N, launch.features), S)](
        x, codes, w.scale, b, out, M, N, K, split_depth(K, S), tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, unscaled,
        gated, rows, launch.features, launch.depth, maps, packed, w.by_thread,
        num_stages=launch.stages, num_warps=launch.warps, enable_fp_fusion=False, **overlap(out),
    )  # fmt: skip
    return out


def _check(name, x, w, b):
    """ValueError for operands that do not fit."""
    check_product(name, x, w, b)
    if on_triton(x) and x.dtype not in _UNSCALED:
        raise ValueError(f"{name} takes rows in bfloat16 or float16 on a GPU, got {x.dtype}")


def float8_parts(x, w, b=None, out=None):
    """Partial sums of float8_linear(x, w, b), for a consumer that adds them: [S, M, N]; see linear_parts

    Raises ValueError for shapes that do not fit.
    """
    _check("float8_parts", x, w, b)
    if not on_triton(x):
        return float8_linear_reference(x, w, b)[None]
    (M, _), N, S = x.shape, w.shape[0], num_splits(*w.shape)
    if S == 1 and out is not None:
        parts = out[None]
    else:
        parts = torch.empty((S, M, N), dtype=x.dtype if S == 1 else torch.float32, device=x.device)
    return _launch(x.contiguous(), w, b, parts, S) if parts.numel() else parts


def float8_linear(x, w, b=None, out=None):
    """y = x W^T + b.  x [M, K], w: Float8Weight [N, K], b [N] -> [M, N], in `out` if it is given, on a GPU

    Raises ValueError for shapes that do not fit.
    """
    _check("float8_linear", x, w, b)
    if not on_triton(x):
        return float8_linear_reference(x, w, b)
    return add_parts(float8_parts(x, w, b, out), x.dtype, out)


def float8_gate_up_silu(x, w, b=None):
    """silu(x Wg^T) * (x Wu^T).  x [M, K], w: Float8Weight [2 I, K], b [2 I] -> [M, I]

    Raises ValueError for shapes that do not fit and for an odd number of weight rows.
    """
    _check("float8_gate_up_silu", x, w, b)
    if w.shape[0] % 2:
        raise ValueError(f"float8_gate_up_silu takes w [2 I, K], gate rows then up rows, got {tuple(w.shape)}")
    if not on_triton(x):
        return silu_mul_reference(float8_linear_reference(x, w, b))
    x = x.contiguous()
    if num_splits(*w.shape) > 1 or not _maps_fit(x, w):
        return silu_mul(float8_linear(x, w, b))
    y = empty_rows(len(x), w.shape[0] // 2, x.dtype, x.device)
    return _launch(x, w, b, y[None], 1, gated=True)[0] if y.numel() else y
