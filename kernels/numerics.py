"""The numerics version: what decides the bits of a device's outputs, by name.

    NUMERICS     a whole number, raised by hand whenever outputs get other bits
    digest()     of every table and size here that orders a sum; tests/kernels/test_numerics.py holds it against the recorded one

Two runs give the same bits if device, dtype, versions of torch and Triton and the numerics version agree. Tiles, stages and warps
of products are not part of it, because they change no bit. Not seen by the digest: the arithmetic written in the kernels.
"""

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .attention import attention_fold, tile_attention
from .linear import linear, linear_table
from .rms_norm import num_warps
from .sampling import sample
from .speculation import row_distributions

NUMERICS = 2
# [N, K] for which the digest holds the rule of num_splits: narrow, square, deep and wide products of models from 0.1B to 70B.
SHAPES = (
    (256, 16384), (960, 576), (576, 1536), (1152, 896), (896, 4864), (151936, 896), (2048, 2048), (2048, 8192), (1024, 4096),
    (5120, 5120), (5120, 13824), (4096, 11008), (3072, 8192), (8192, 8192), (8192, 28672), (57344, 8192), (32000, 4096),
)  # fmt: skip


@dataclass(frozen=True)
class Numerics:
    """All that two runs must have in common to give the same bits."""

    version: int  # NUMERICS
    digest: str
    torch: str
    triton: str | None
    device: str  # name of the GPU or processor
    dtype: str

    @classmethod
    def of(cls, device, dtype):
        """Those of a torch.device and a torch.dtype."""
        words = str(torch.__version__), installed("triton"), device_name(device), str(dtype).removeprefix("torch.")
        return cls(NUMERICS, digest(), *words)


def tables():
    """Every number that orders a sum, {kind: {name: value}}."""
    shapes = (*linear_table.SPLITS, *SHAPES)
    splits = [(n, k, linear_table.num_splits(n, k)) for n, k in shapes]
    return {
        "products": {
            "splits": splits,
            "ranges": [linear_table.split_depth(k, count) for _, k, count in splits],
            "alignment": linear_table.SPLIT_ALIGNMENT,
            "depth in float32": linear_table.FLOAT32.depth,
        },
        "attention": {"tile": attention_fold.PAGE, "chunks": attention_fold.CHUNKS},
        "norms": {"warps": [(2**n, num_warps(2**n)) for n in range(4, 16)]},
        "vocabulary": {"scores": sample.SUM_CHUNK, "ratio rules": row_distributions.SUM_CHUNK},
        "CPU": {
            "rows": linear.BLOCK_ROWS,
            "features": {str(dtype): count for dtype, count in linear.FEATURES.items()},
            "tile": tile_attention.TILE,
            "query rows": tile_attention.ROWS,
        },
    }


def digest():
    """Twelve hex digits of `tables`."""
    return hashlib.sha256(json.dumps(tables(), sort_keys=True).encode()).hexdigest()[:12]


def device_name(device):
    """The name of a device's processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installed(package):
    """Version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
