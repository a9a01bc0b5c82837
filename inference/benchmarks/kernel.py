"""`headstart bench kernel`: one operation at the sizes of a named shape, against the library and the floor.

The weights, keys or rows that an operation reads are rotated past the last-level cache, as the layers of a model do, and all of a
round is one CUDA graph; figures are per call. The floor is the larger of bytes over the rate of a copy and operations over the rate
of the library's 8192 x 8192 x 8192 product, both measured in the same run.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels.embedding import embed
from ...kernels.gated_mlp import gate_up_silu
from ...kernels.kv_commit import kv_commit
from ...kernels.linear import linear, linear_parts
from ...kernels.prefill_attention import build_prefill_index
from ...kernels.res_block import add_silu
from ...kernels.rms_norm import add_rms_norm
from ...kernels.rotary_kv_write import rotary_kv_write
from ...kernels.sample import sample_tokens, top_tokens
from ...kernels.tree_attention import PAGE, build_tree_index
from ...kernels.verify_strict import verify_strict
from ..memory import free_bytes, in_gib
from ..verify import TreeTensors
from .floor import copy_bandwidth, milliseconds, product_rate
from .library import LibraryAttention, rotate
from .losses import bench_distill_loss
from .results import Report, decimals, plain
from .rules import bench_rules
from .shape import NUM_HEADS, check_fits, config_of_shape, spread_tree
from .timing import Repeatable, release

# More than a round should find in the last-level cache (50 to 60 MB on an H100 or H200), and the most copies of anything.
ROTATED_BYTES = {"cuda": 240 << 20, "cpu": 0}
MOST_COPIES = 64
ROUND_CALLS = {"cuda": 12, "cpu": 1}
# From so many rows on it is prefill, which asks the lm_head for the last token of a prompt only.
PREFILL_ROWS = 512

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
    """What `bench kernel` measures; see `headstart bench kernel --help`."""

    op: str
    shape: str
    rows: tuple[int, ...] = (1, 16, 64, 2048)
    contexts: tuple[int, ...] = (1024, 8192)
    batch: int = 1
    tokens: tuple[int, ...] = (4096, 16384)
    repeats: int = 15


@dataclass(frozen=True)
class Sizes:
    """What of a config the operations depend on."""

    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, config):
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


def bench_kernel(settings, device, dtype, command, output=None, commit=None):
    """Measure one operation, or "all". Prints the table, then the JSON object, which is returned."""
    device = torch.device(device)
    names = list(OPERATIONS) if settings.op == "all" else [settings.op]
    if device.type != "cuda" and settings.op == "prefill_attention":
        raise ValueError(
            "prefill_attention runs on a GPU only: elsewhere prompts go through the pass that verifies trees"
        )
    sizes = Sizes.of(config_of_shape(settings.shape))
    check_fits(settings.shape, device, dtype, largest_product, "the largest weights")
    report = Report("kernel", COLUMNS, device, command, vars(settings), output, commit)
    bench = KernelBench(settings, sizes, device, dtype, report)
    for name in names:
        if device.type == "cuda" or name != "prefill_attention":
            release(device)
            with torch.no_grad():
                OPERATIONS[name](bench)
    return report.finish()


def largest_product(config, dtype):
    """Bytes of the largest weights of one product: more than one product's are never held at once."""
    return dtype.itemsize * max(out * width for out, width in Sizes.of(config).products.values())


def sweep_kernel(settings, device, dtype, command, output=None, commit=None):
    """Try launch configurations of linear for the shape's products; prints the winners, then the JSON object, which is returned."""
    if settings.op != "linear":
        raise ValueError(f"--sweep is for linear, whose launches stand in a table; got {settings.op!r}")
    from .linear_sweep import sweep_linear

    report = Report("kernel-sweep", {}, device, command, vars(settings), output, commit)
    products = Sizes.of(config_of_shape(settings.shape)).products
    report.rows = sweep_linear(products, settings.rows, torch.device(device), dtype)
    return report.finish()


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
        """How many inputs of so many bytes a round goes through."""
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
        """Times of one call. A round holds at least ROUND_CALLS: launching a graph takes as long as a short kernel."""
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


def bench_linear(bench):
    """linear, and linear_parts whose sum the next operation takes over, for a layer's products and the lm_head."""
    for rows in bench.settings.rows:
        totals = []
        for name, (out, width) in bench.sizes.products.items():
            if name == "lm_head" and rows >= PREFILL_ROWS:
                continue
            weights = [bench.random(out, width, scale=width**-0.5) for _ in range(bench.copies(out * width * 2))]
            x = bench.random(rows, width)
            moved = (out * width + rows * (out + width)) * x.element_size()
            work = (2 * rows * out * width, len(weights))
            what = f"{name} {out} x {width}"
            times = bench.line(
                "linear",
                what,
                rows,
                lambda x=x, ws=weights: [linear(x, w) for w in ws],
                lambda x=x, ws=weights: [F.linear(x, w) for w in ws],
                moved,
                *work,
            )
            if linear_parts(x, weights[0]).shape[0] > 1:
                bench.line(
                    "linear_parts",
                    what,
                    rows,
                    lambda x=x, ws=weights: [linear_parts(x, w) for w in ws],
                    None,
                    moved,
                    *work,
                )
            if name != "lm_head":
                totals.append(times)
            del weights
            release(bench.device)
        ours, library = (sum(column) for column in zip(*totals))
        bench.report.note(
            f"         a layer's four products at {rows} rows: {ours * 1e3:.1f} us, library {library * 1e3:.1f} us: "
            f"{library / ours:.3f} of the library's rate"
        )
        bench.report.facts[f"layer_rate_of_library_at_{rows}_rows"] = round(library / ours, 4)


def bench_gated_mlp(bench):
    out, width = bench.sizes.products["gate_up"]
    weights = [bench.random(out, width, scale=width**-0.5) for _ in range(bench.copies(out * width * 2))]

    def library(x):
        for w in weights:
            gate, up = F.linear(x, w).chunk(2, -1)
            F.silu(gate) * up

    for rows in bench.settings.rows:
        x = bench.random(rows, width)
        moved = (out * width + rows * (out // 2 + width)) * x.element_size()
        ours = lambda x=x: [gate_up_silu(x, w) for w in weights]  # noqa: E731
        work = (2 * rows * out * width, len(weights))
        bench.line("gated_mlp", f"{out} x {width}", rows, ours, lambda x=x: library(x), moved, *work)


def paged_cache(bench, batch, positions):
    """Random keys and values of some layers, and the block table of `batch` requests.  kv [layers, 2, rows, D], [B, P]"""
    sizes = bench.sizes
    pages = -(-positions // PAGE)
    rows = (batch * pages + 1) * sizes.num_kv_heads * PAGE
    layers = min(sizes.layers, bench.copies(2 * rows * sizes.head_dim * 2))
    kv = bench.random(layers, 2, rows, sizes.head_dim)
    return kv, 1 + torch.arange(batch * pages, device=bench.device).view(batch, pages)


def bench_attention(bench):
    """Tree attention of `rows` nodes per request behind a context; the library's way gets a mask over dense keys."""
    sizes, batch = bench.sizes, bench.settings.batch
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    for context in bench.settings.contexts:
        for rows in bench.settings.rows:
            if rows > PAGE:
                continue  # that is prefill
            release(bench.device)
            kv, table = paged_cache(bench, batch, context + rows)
            tree = TreeTensors(spread_tree(rows), bench.device)
            committed = torch.full((batch,), context, device=bench.device)
            q = bench.random(batch * rows, sizes.num_heads, sizes.head_dim)
            arguments = (table, committed, tree.depths, tree.ancestors, sizes.num_kv_heads, bench.dtype)
            index = build_tree_index(*arguments)
            mask = None
            if rows > 1:
                own = torch.zeros(rows, rows, dtype=torch.bool, device=bench.device).scatter_(
                    1, tree.ancestors.long(), True
                )
                mask = torch.cat((torch.ones(rows, context, dtype=torch.bool, device=bench.device), own), 1)
            dense = bench.random(kv.shape[0], 2, batch, sizes.num_kv_heads, context + rows, sizes.head_dim)
            dense_q = q.view(batch, rows, sizes.num_heads, sizes.head_dim)
            attention = LibraryAttention(batch, rows, *heads, mask, bench.dtype, bench.device).choose(dense_q, dense)
            keys = batch * context
            bench.line(
                "attention",
                f"batch {batch}, {context} keys",
                rows,
                lambda q=q, kv=kv, index=index: [index.attend(q, layer) for layer in kv],
                lambda q=dense_q, kv=dense, run=attention: [run(q, *layer) for layer in kv],
                2 * keys * sizes.num_kv_heads * sizes.head_dim * kv.element_size(),
                4 * keys * rows * sizes.num_heads * sizes.head_dim,
                kv.shape[0],
            )


def bench_prefill_attention(bench):
    """A whole prompt at once; the library's way is FlashAttention through scaled_dot_product_attention, causal."""
    sizes = bench.sizes
    for tokens in bench.settings.tokens:
        release(bench.device)
        kv, table = paged_cache(bench, 1, tokens)
        q = bench.random(tokens, sizes.num_heads, sizes.head_dim)
        index = build_prefill_index(table, [0], [tokens], sizes.num_kv_heads, bench.device)
        dense_q = q.transpose(0, 1)[None].contiguous()
        dense = bench.random(2, 1, sizes.num_kv_heads, tokens, sizes.head_dim)

        def library(q=dense_q, kv=dense):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True, enable_gqa=True)

        operations = 2 * tokens * (tokens + 1) * sizes.num_heads * sizes.head_dim
        moved = 2 * dense_q.nbytes + dense.nbytes
        ours = lambda q=q, layer=kv[0], index=index: index.attend(q, layer)  # noqa: E731
        bench.line("prefill_attention", f"{tokens} tokens, causal", tokens, ours, library, moved, operations)


def bench_rms_norm(bench):
    """Residual and norm."""
    width, weight = bench.sizes.hidden, bench.random(bench.sizes.hidden)
    for rows in bench.settings.rows:
        pairs = [bench.random(2, rows, width) for _ in range(bench.copies(4 * rows * width * 2))]

        def ours(pairs=pairs):
            for x, residual in pairs:
                add_rms_norm(x, residual, weight, 1e-5)

        def library(pairs=pairs):
            for x, residual in pairs:
                F.rms_norm(x + residual, (width,), weight, 1e-5)

        moved = 4 * rows * width * weight.element_size()
        bench.line("rms_norm", f"add + norm, {width}", rows, ours, library, moved, calls=len(pairs))


def bench_rotary(bench):
    """Rotation of q and k and the write of k and v."""
    sizes = bench.sizes
    hq, hk, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    for rows in bench.settings.rows:
        kv, table = paged_cache(bench, 1, rows)
        width = (hq + 2 * hk) * dim
        projected = [bench.random(1, rows, width) for _ in range(len(kv))]
        positions = torch.arange(rows, device=bench.device)
        places = table[0, positions // PAGE] * PAGE + positions % PAGE
        cos, sin = torch.randn(2, rows, dim // 2, device=bench.device)
        dense = bench.random(2, rows, hk, dim)

        def ours(projected=projected, kv=kv, positions=positions, places=places, cos=cos, sin=sin):
            for qkv, layer in zip(projected, kv):
                rotary_kv_write(qkv, positions, cos, sin, places, layer, hq, hk)

        def library(projected=projected, dense=dense, cos=cos, sin=sin, rows=rows):
            for qkv in projected:
                qkv = qkv.view(rows, hq + 2 * hk, dim)
                qk = rotate(qkv[:, : hq + hk], cos[:, None], sin[:, None])
                dense[0].copy_(qk[:, hq:])
                dense[1].copy_(qkv[:, hq + hk :])

        moved = 2 * rows * width * dense.element_size()
        bench.line("rotary", f"{hq} + {hk} heads of {dim}", rows, ours, library, moved, calls=len(kv))


def bench_embedding(bench):
    table = bench.random(bench.sizes.vocab, bench.sizes.hidden)
    for rows in bench.settings.rows:
        tokens = [bench.integers(bench.sizes.vocab, rows) for _ in range(8)]
        moved = 2 * rows * bench.sizes.hidden * table.element_size()
        ours = lambda tokens=tokens: [embed(one, table) for one in tokens]  # noqa: E731
        library = lambda tokens=tokens: [F.embedding(one, table) for one in tokens]  # noqa: E731
        bench.line("embedding", f"{table.shape[0]} x {table.shape[1]}", rows, ours, library, moved, calls=len(tokens))


def bench_res_block(bench):
    """x + silu(product) of all Medusa heads."""
    heads, width = NUM_HEADS, bench.sizes.hidden
    for rows in bench.settings.rows:
        if rows >= PREFILL_ROWS:
            continue
        x, parts = bench.random(rows, width), torch.randn(2, rows, heads * width, device=bench.device)
        moved = parts.nbytes + (1 + heads) * x.nbytes
        library = lambda x=x, parts=parts: x[:, None] + F.silu(parts.sum(0).view(-1, heads, width).to(x.dtype))  # noqa: E731
        ours = lambda x=x, parts=parts: add_silu(x, parts, heads)  # noqa: E731
        bench.line("res_block", f"{heads} heads, 2 parts, {width}", rows, ours, library, moved)


def bench_sample(bench):
    """The target's token per row, greedy and at temperature 1, and a drafter's ten best."""
    vocab = bench.sizes.vocab
    for rows in bench.settings.rows:
        if rows >= PREFILL_ROWS:
            continue
        logits = bench.random(rows, vocab, scale=3)
        ones, seeds = torch.ones(rows, device=bench.device), torch.arange(rows, device=bench.device)
        keys = (seeds, torch.zeros_like(seeds), seeds)

        def drawn(logits=logits):
            law = logits.float().softmax(-1)
            return (law / torch.empty_like(law).exponential_()).argmax(-1)

        cases = (
            ("greedy", lambda x=logits, k=keys, t=ones * 0: sample_tokens(x, t, *k), lambda x=logits: x.argmax(-1)),
            ("temperature 1", lambda x=logits, k=keys, t=ones: sample_tokens(x, t, *k), drawn),
            ("10 best", lambda x=logits, k=keys, t=ones * 0: top_tokens(x, 10, t, *k), lambda x=logits: x.topk(10)),
        )
        for what, ours, library in cases:
            bench.line("sample", f"{what}, {vocab}", rows, ours, library, logits.nbytes)


def bench_verify(bench):
    """The verdict on a tree, one program per request."""
    batch = bench.settings.batch
    for rows in bench.settings.rows:
        if not 1 < rows <= PAGE:
            continue
        tree = TreeTensors(spread_tree(rows), bench.device)
        tokens, target = bench.integers(50, 2, batch, rows)
        limit = torch.full((batch,), 100, device=bench.device)

        def ours(tree=tree, tokens=tokens, target=target, limit=limit):
            return verify_strict(tree.parents, tree.depths, tokens, target, limit, tree.max_depth)

        bench.line("verify", f"batch {batch}, {tree.max_depth} deep", rows, ours, None, 2 * tokens.nbytes)


def bench_commit(bench):
    """Keys and values of an accepted path move behind the committed ones, in all layers."""
    sizes, batch = bench.sizes, bench.settings.batch
    for rows in bench.settings.rows:
        if not 1 < rows <= PAGE:
            continue
        tree = TreeTensors(spread_tree(rows), bench.device)
        context = bench.settings.contexts[0]
        pages = -(-(context + rows) // PAGE)
        table = 1 + torch.arange(batch * pages, device=bench.device).view(batch, pages)
        kv = bench.random(sizes.layers, 2, (batch * pages + 1) * sizes.num_kv_heads * PAGE, sizes.head_dim)
        committed = torch.full((batch,), context, device=bench.device)
        path = tree.ancestors[tree.deepest].expand(batch, -1).contiguous()
        accepted = torch.full((batch,), tree.max_depth, device=bench.device)
        moved = 2 * 2 * sizes.layers * batch * tree.max_depth * sizes.num_kv_heads * sizes.head_dim * kv.element_size()

        def ours(kv=kv, table=table, committed=committed, path=path, accepted=accepted):
            kv_commit(kv, table, committed, path, accepted, sizes.num_kv_heads)

        bench.line("commit", f"batch {batch}, {sizes.layers} layers", rows, ours, None, moved)


OPERATIONS = {
    "linear": bench_linear,
    "gated_mlp": bench_gated_mlp,
    "attention": bench_attention,
    "prefill_attention": bench_prefill_attention,
    "rms_norm": bench_rms_norm,
    "rotary": bench_rotary,
    "embedding": bench_embedding,
    "res_block": bench_res_block,
    "sample": bench_sample,
    "verify": bench_verify,
    "rules": bench_rules,
    "distill_loss": bench_distill_loss,
    "commit": bench_commit,
}
