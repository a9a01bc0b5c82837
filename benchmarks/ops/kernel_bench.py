"""Common parts of `headstart bench kernel`: inputs of a shape's sizes, copies past the cache, times beside the floor."""

import math
from dataclasses import dataclass

import torch

from ...evaluation.results import decimals, plain
from ...evaluation.timing import Repeatable
from ...inference.models.decoder import check_packed
from ...inference.models.memory import free_bytes, in_gib
from ..floor import copy_bandwidth, milliseconds, product_rate

# Bytes of a round, well beyond the last-level cache (50 to 60 MB on an H100 or H200), and the greatest number of copies.
ROTATED_BYTES = {"cuda": 240 << 20, "cpu": 0}


MOST_COPIES = 64


ROUND_CALLS = {"cuda": 12, "cpu": 1}


COLUMNS = {
    "op": ("operation", 17, plain),
    "what": ("size", 26, plain),
    "rows": ("rows", 5, plain),
    "p20": ("p20 us", 8, decimals(1)),
    "p50": ("p50 us", 8, decimals(1)),
    "p80": ("p80 us", 8, decimals(1)),
    "floor": ("floor us", 8, decimals(1)),
    "over_floor": ("x floor", 7, decimals(2)),
    "tflops": ("TFLOP/s", 7, decimals(0)),
    "library": ("library us", 10, decimals(1)),
    "speedup": ("faster", 6, lambda value: f"{value:.2f}x"),
}


@dataclass(frozen=True)
class KernelSettings:
    """Settings of `bench kernel`; see `headstart bench kernel --help`."""

    op: str
    shape: str
    rows: tuple[int, ...] = (1, 16, 64, 2048)
    contexts: tuple[int, ...] = (1024, 8192)
    batch: int = 1
    tokens: tuple[int, ...] = (4096, 16384)
    repeats: int = 15


@dataclass(frozen=True)
class Sizes:
    """The sizes in a config that the operations depend on."""

    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, config):
        check_packed(config)
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            layers=config.num_hidden_layers,
        )

    @property
    def products(self):
        """{name: (N, K)} of a layer's four products and the lm_head."""
        query = self.num_heads * self.head_dim
        return {
            "qkv": (query + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            "out": (self.hidden, query),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
        }


class KernelBench:
    """Makes inputs, times an operation and its counterpart, and writes the lines."""

    def __init__(self, settings, sizes, device, dtype, report):
        self.settings, self.sizes, self.device, self.dtype, self.report = settings, sizes, device, dtype, report
        self.bandwidth, self.rate = copy_bandwidth(device), product_rate(device, dtype)
        report.state(
            f"{settings.shape}, {str(dtype).removeprefix('torch.')}, on {report.head['hardware']}: copy "
            f"{self.bandwidth / 1e12:.3f} TB/s (bytes read and written), large product {self.rate / 1e12:.0f} TFLOP/s",
            copy_bytes_per_second=round(self.bandwidth),
            product_flops=round(self.rate),
            dtype=str(dtype).removeprefix("torch."),
        )

    def random(self, *shape, scale=1.0):
        needed, free = math.prod(shape) * self.dtype.itemsize, free_bytes(self.device)
        if needed > free:
            raise ValueError(
                f"a tensor of {' x '.join(map(str, shape))} takes {in_gib(needed)} and {in_gib(free)} are free on "
                f"{self.device}: lower --batch, --context or --rows"
            )
        return torch.randn(*shape, device=self.device, dtype=self.dtype).mul_(scale)

    def integers(self, high, *shape):
        return torch.randint(high, shape, device=self.device)

    def copies(self, num_bytes):
        """Number of inputs of num_bytes bytes in a round."""
        return max(1, min(MOST_COPIES, -(-ROTATED_BYTES[self.device.type] // num_bytes)))

    def line(self, op, what, rows, ours, library, num_bytes, operations=0, calls=1):
        """Time and report. ours and library (or None) do `calls` calls, each of `num_bytes` and `operations`.

        Returns (ours, library) in ms per call; the library's is None without one.
        """
        times = self.time(ours, calls)
        other = self.time(library, calls) if library else None
        self.row(
            op, what, rows, times, other, milliseconds(num_bytes, self.bandwidth, operations, self.rate), operations
        )
        return times.p50, other and other.p50

    def time(self, work, calls):
        """Times of one call. A round has at least ROUND_CALLS calls, because launching a graph takes as long as a short kernel."""
        rounds = -(-ROUND_CALLS[self.device.type] // calls)
        several = Repeatable(lambda: [work() for _ in range(rounds)], self.device, calls * rounds)
        return several.time(self.settings.repeats)

    def row(self, op, what, rows, times, library, floor, operations=0):
        row = {"op": op, "what": what, "rows": rows}
        row |= {name: value * 1e3 for name, value in times.as_dict().items()}
        row |= {"floor": floor * 1e3, "over_floor": times.p50 / floor}
        if operations:
            row["tflops"] = operations / times.p50 / 1e9
        if library:
            row |= {"library": library.p50 * 1e3, "speedup": library.p50 / times.p50}
        self.report.add(row)
