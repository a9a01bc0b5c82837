"""`headstart bench draft`: time drafting part by part, with random heads of the sizes of published ones.

The target has only an embedding, an lm_head and one layer, because drafting reads no more of it. The heads draft greedily for
requests with `context` committed tokens. One CUDA graph holds several drafts; their requests are gathered beforehand, as a step
does once for all its parts. *level* is a difference: the time of a chain of `depth` levels less that of a chain of one level,
divided by the further levels. It includes all costs of a further level, but not the first level, gathering noise, joining tokens.

A dynamic tree is compared with a static tree that expands as many nodes at each depth and takes as many candidates of each. The
difference is *tree building*: the confidence of the candidates, choosing among them and joining the tree.

The floor is the weights that a part reads, read once, at the rate of a copy measured in the same run. Not measured: acceptance,
temperatures above 0, the verifiers that compare distributions.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch

from ...evaluation.results import Report, decimals, plain, shares_text
from ...evaluation.timing import Repeatable, Times, release
from ...inference.engine.cache import PagedCache
from ...inference.models.support import decoder_class, weight_bytes
from ...inference.speculation.proposers import HeadProposer
from ...inference.speculation.tree import DEFAULT_DYNAMIC, MAX_NODES, GrowingTree, Tree, chain
from ...inference.speculation.tree_on_device import TreeOnDevice
from ...kernels.attention.tree_attention import PAGE
from ..floor import copy_bandwidth, milliseconds
from ..random_heads import empty_head, parameter_bytes, random_head
from ..shape import check_fits, config_of_shape
from .step import standing_seats

CALLS = {"cuda": 5, "cpu": 1}  # in one graph: the launch of a graph takes as long as a short kernel

COLUMNS = {
    "head": ("head", 14, plain),
    "batch": ("batch", 5, plain),
    "part": ("part", 22, plain),
    "p20": ("p20 ms", 8, decimals(4)),
    "p50": ("p50 ms", 8, decimals(4)),
    "p80": ("p80 ms", 8, decimals(4)),
    "floor": ("floor ms", 8, decimals(4)),
    "over_floor": ("x floor", 7, decimals(2)),
}


@dataclass(frozen=True)
class DraftSettings:
    """Settings of `bench draft`; see `headstart bench draft --help`."""

    shape: str
    heads: tuple[str, ...] = ("medusa", "mlp_speculator", "eagle", "eagle3")
    batches: tuple[int, ...] = (1, 16)
    depth: int = 5
    dynamic: bool = False
    context: int = 1024
    repeats: int = 20


def bench_draft(settings, device, dtype, command, output=None, commit=None):
    """Measure every line of `settings`. Prints the table, then the JSON object, which is returned."""
    config, depth = config_of_shape(settings.shape), settings.depth
    width = DEFAULT_DYNAMIC.width
    most = (MAX_NODES - 1) // width if settings.dynamic else MAX_NODES - 1
    if not 2 <= depth <= most:
        what = f"of dynamic trees {width} wide " if settings.dynamic else ""
        raise ValueError(f"--depth {what}must be from 2 to {most}, got {depth}")
    if settings.context >= config.max_position_embeddings:
        longest = config.max_position_embeddings - 1
        raise ValueError(f"--context {settings.context} is beyond {settings.shape}: at most {longest} fit")

    def needed(config, dtype):
        beside = max(parameter_bytes(empty_head(name, config, depth), dtype) for name in settings.heads)
        return weight_bytes(one_layer(config), dtype) + beside

    check_fits(settings.shape, device, dtype, num_bytes=needed, what="the embedding, lm_head and a head")
    report = Report("draft", COLUMNS, device, command, vars(settings), output, commit)
    places = settings.context + 2 * MAX_NODES
    where = dict(dtype=dtype, device=torch.device(device), max_positions=places)
    config_of_one = one_layer(config)
    decoder = decoder_class(config_of_one).from_pretrained(None, config_of_one, load_format="dummy", **where)
    bandwidth = copy_bandwidth(device)
    name = str(dtype).removeprefix("torch.")
    report.state(
        f"{settings.shape}, {name}, on {report.head['hardware']}: copy {bandwidth / 1e12:.3f} TB/s (bytes read and written)",
        copy_bytes_per_second=round(bandwidth),
        dtype=name,
    )
    for method in settings.heads:
        bench = DraftBench(settings, config, decoder, method, bandwidth, report)
        for batch in settings.batches:
            try:
                bench.measure(batch)
            except torch.cuda.OutOfMemoryError:
                report.note(f"{method}, batch {batch}: left out, out of memory")
        del bench
        release(decoder.device)
    return report.finish()


def one_layer(config):
    """The same target with a single layer."""
    config = deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return config


def parallel_chains(width, depth):
    """The static tree whose drafting expands `width` nodes at each depth below the root and asks `width` candidates of each."""
    parents, ranks = [-1, *[0] * width], [0, *range(width)]
    for first in range(1, 1 + (depth - 1) * width, width):
        parents += range(first, first + width)
        ranks += [width - 1] * width
    return Tree(tuple(parents), tuple(ranks))


def dynamic_tree(depth):
    """DEFAULT_DYNAMIC with this depth."""
    width = DEFAULT_DYNAMIC.width
    most = 1 + width + (depth - 1) * width**2
    return GrowingTree(depth, width, min(DEFAULT_DYNAMIC.num_nodes, most))


def per_unit(whole, part, count=1):
    """Times of one unit, where `whole` is `part` and `count` units: (whole - median of part) / count, per percentile of whole."""
    return Times(*((value - part.p50) / count for value in (whole.p20, whole.p50, whole.p80)))


class DraftBench:
    """The lines of one head."""

    def __init__(self, settings, config, decoder, method, bandwidth, report):
        self.settings, self.decoder, self.method = settings, decoder, method
        self.bandwidth, self.report = bandwidth, report
        head = random_head(method, config, decoder, settings.depth)
        self.drafter = HeadProposer(head, head).build(chain(settings.depth), "shared_noise", decoder, None)
        self.bytes = head.draft_bytes(decoder.lm_head.nbytes)
        # The target's feature: the last hidden state, or the streams of some layers.
        self.feature_width = decoder.hidden_size * max(len(self.drafter.streams), 1)

    def measure(self, batch):
        settings, drafter = self.settings, self.drafter
        depth, repeats = settings.depth, settings.repeats
        release(self.decoder.device)
        if drafter.kv_shape is not None:
            pages = batch * -(-(settings.context + 2 * MAX_NODES) // PAGE)
            cache = PagedCache(pages, *drafter.kv_shape, self.decoder.device)
            cache.kv.normal_()
            drafter.attach(cache.kv)
        first, later = self.bytes["first"], self.bytes.get("level")
        if later is None:
            whole = self.draft(batch, chain(depth))
            self.add(batch, f"chain of {depth}", whole.time(repeats), first, whole.shares())
        else:
            start, whole = self.draft(batch, chain(1)).time(repeats), self.draft(batch, chain(depth))
            whole, shares = whole.time(repeats), whole.shares()
            self.add(batch, "first level", start, first)
            self.add(batch, "level", per_unit(whole, start, depth - 1), later)
            if "advance" in self.bytes:
                self.add(batch, "after a step", self.advance(batch).time(repeats), self.bytes["advance"])
            self.add(batch, f"chain of {depth}", whole, first + (depth - 1) * later, shares)
            if settings.dynamic:
                self.dynamic_lines(batch, first + (depth - 1) * later)

    def dynamic_lines(self, batch, num_bytes):
        depth, width = self.settings.depth, DEFAULT_DYNAMIC.width
        static = self.draft(batch, parallel_chains(width, depth)).time(self.settings.repeats)
        grown = self.draft(batch, dynamic_tree(depth))
        grown, shares = grown.time(self.settings.repeats), grown.shares()
        self.add(batch, f"levels of {width} rows", static, num_bytes)
        self.add(batch, "dynamic tree", grown, num_bytes, shares)
        self.add(batch, "tree building", per_unit(grown, static))

    def gathered(self, batch, tree):
        """BatchRows of the requests, as a step gathers them for this TreeOnDevice."""
        state = self.drafter.state_shape or (self.decoder.hidden_size, self.decoder.dtype)
        context, device = self.settings.context, self.decoder.device
        seats = standing_seats(batch, context, 2 * MAX_NODES, state, self.decoder.vocab_size, device)
        return seats.gather(torch.arange(batch, device=device), tree.depths)

    def draft(self, batch, tree):
        """The whole draft of a tree, repeatable."""
        tree = TreeOnDevice.of(tree, self.decoder.device)
        rows = self.gathered(batch, tree)
        return self.repeatable(lambda: self.drafter.propose(rows, tree))

    def advance(self, batch):
        """The pass after a step whose whole chain was accepted; its time does not depend on the number of accepted tokens."""
        depth, device = self.settings.depth, self.decoder.device
        tree = TreeOnDevice.of(chain(depth), device)
        rows = self.gathered(batch, tree)
        feature = torch.randn(batch, tree.num_nodes, self.feature_width, dtype=self.decoder.dtype, device=device)
        emitted = torch.randint(self.decoder.vocab_size, (batch, depth + 2), device=device)
        accepted = torch.full((batch,), depth, device=device)
        return self.repeatable(lambda: self.drafter.advance(rows, feature, emitted, accepted))

    def repeatable(self, work):
        calls = CALLS[self.decoder.device.type]
        return Repeatable(lambda: [work() for _ in range(calls)], self.decoder.device, calls)

    def add(self, batch, part, times, num_bytes=None, shares=None):
        floor = None if num_bytes is None else milliseconds(num_bytes, self.bandwidth)
        row = {"head": self.method, "batch": batch, "part": part, **times.as_dict(), "floor": floor}
        row |= {"over_floor": None if floor is None else times.p50 / floor, "weight_bytes": num_bytes}
        self.report.add(row if shares is None else row | {"shares": shares})
        if shares is not None:
            self.report.note(f"         {shares_text(shares)}")
