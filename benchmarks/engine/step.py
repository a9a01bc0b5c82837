"""`headstart bench step`: the target's pass over a draft tree, and the whole speculative step, against floor and library.

One CUDA graph per line, on random weights of a named shape. A line's *forward* is the cost of verifying: embedding, all layers,
lm_head and the target's token per node, after `context` committed tokens of each of `batch` requests, over a tree of `rows` nodes.
With Medusa heads there are lines for the *draft*, the *verify* rule and the *commit* (moving the keys and values of a full path,
setting the next root) alone, and for the whole step as the engine replays it. Acceptance does not matter: the work is the same.

The floor is the weights and the committed keys and values, read once, at the rate of a copy measured in the same run. Lines whose
memory does not suffice are left out with a note.
"""

from dataclasses import dataclass, replace

import torch

from ...evaluation.results import Report, decimals, plain, shares_text
from ...evaluation.timing import Repeatable, plannable_bytes, release
from ...inference.engine.cache import PagedCache
from ...inference.engine.seats import FLOATS, INTEGERS, SeatTable
from ...inference.engine.step import Step
from ...inference.engine.target_scores import NO_FILTERS, TargetScores
from ...inference.speculation.draft import Draft
from ...inference.speculation.drafters.drafter import NoDrafter
from ...inference.speculation.drafters.medusa import MedusaDrafter
from ...inference.speculation.tree import ROOT_ONLY
from ...inference.speculation.tree_on_device import TreeOnDevice
from ...inference.speculation.verifiers import Strict
from ...kernels.attention.kv_commit import kv_commit
from ...kernels.attention.tree_attention import PAGE
from ..floor import copy_bandwidth, kv_bytes, milliseconds, weight_bytes
from ..library import LibraryStep
from ..random_heads import random_head
from ..shape import NUM_HEADS, best_tree, check_fits, config_of_shape, random_decoder

SHORT_CALLS = 10
DEFAULT_CONTEXTS = (1024, 8192)
HEAD_LAYOUTS = ("own", "shared")  # whose lm_head the heads use

COLUMNS = {
    "context": ("context", 7, plain),
    "batch": ("batch", 5, plain),
    "rows": ("rows", 4, plain),
    "part": ("part", 18, plain),
    "p20": ("p20 ms", 8, decimals(3)),
    "p50": ("p50 ms", 8, decimals(3)),
    "p80": ("p80 ms", 8, decimals(3)),
    "floor": ("floor ms", 8, decimals(3)),
    "over_floor": ("x floor", 7, decimals(2)),
    "library": ("library ms", 10, decimals(3)),
    "speedup": ("faster", 6, lambda value: f"{value:.2f}x"),
    "extra": ("on top", 7, lambda value: f"{value:.1%}"),
}


@dataclass(frozen=True)
class StepSettings:
    """Settings of `bench step`; see `headstart bench step --help`."""

    shape: str
    rows: tuple[int, ...] = (1, 8, 16, 32, 64)
    contexts: tuple[int, ...] | None = None  # DEFAULT_CONTEXTS, as far as the model's positions reach
    batches: tuple[int, ...] = (1, 8, 32)
    lm_heads: tuple[str, ...] = HEAD_LAYOUTS
    baseline: str = "compiled"
    repeats: int = 20
    as_module: bool = False  # run the model's own module where the engine has kernels of its own for it


def standing_seats(batch, context, num_places, state, vocab_size, device):
    """The SeatTable of `batch` greedy requests after `context` tokens, with pages for num_places more places.

    state: (width, dtype) of the drafter's state of a request, which is random here
    """
    pages = -(-(context + num_places) // PAGE)
    width, dtype = state
    seats = SeatTable(batch, pages, width, vocab_size, dtype, device)
    values = {"committed": context, "remaining": 1 << 20}
    for column, name in enumerate(INTEGERS):
        seats.integers[:batch, column] = values.get(name, 0)
    seats.integers[:batch, INTEGERS.index("root")] = torch.randint(vocab_size, (batch,), device=device)
    seats.floats[:, FLOATS.index("top_p")] = 1.0
    seats.block_table[:batch] = 1 + torch.arange(batch * pages, device=device).view(batch, pages)
    seats.feature.normal_()
    return seats


class KnownTokens:
    """The target's own tokens of StandingRequests, in place of a TargetScores."""

    def __init__(self, standing):
        self.batch, self.drafted, self.tokens = standing.gathered(), standing.tokens, standing.target_tokens

    def sample(self):
        return self.tokens


class StandingRequests:
    """B requests that stay after `context` tokens however often a step is repeated, and the engine's step over them.

    decoder, cache: with room for the requests (`pages_needed`); tree: Tree; drafter and verifier as Step takes them. Only `whole`
    and `commit` move the requests, and they put them back first, so they too can be captured once and replayed.
    """

    def __init__(self, decoder, cache, batch, context, tree, verifier, drafter):
        device, state = decoder.device, (decoder.hidden_size, decoder.dtype)
        seats = standing_seats(batch, context, tree.num_nodes, state, decoder.vocab_size, device)
        self.seats, self.rows = seats, torch.arange(batch, device=device)
        self.tree = TreeOnDevice.of(tree, device)
        self.step = Step(decoder, cache, seats, tree=self.tree, verifier=verifier, drafter=drafter)
        self.tokens = torch.randint(decoder.vocab_size, (batch, tree.num_nodes), device=device)
        self.target_tokens = torch.randint_like(self.tokens, decoder.vocab_size)
        self.saved = seats.integers.clone()
        self.hidden = torch.zeros(batch * tree.num_nodes, decoder.hidden_size, dtype=decoder.dtype, device=device)
        # The deepest path is accepted whole: that commit moves the most.
        self.path = self.tree.ancestors[tree.deepest].expand(batch, -1).contiguous()
        self.num_accepted = torch.full((batch,), tree.max_depth, device=device)

    def gathered(self):
        return self.seats.gather(self.rows, self.tree.depths)

    def forward(self):
        """The target over all nodes, and its token after each."""
        batch = self.gathered()
        logits = self.step.decoder.logits(self.step.forward(batch, self.tokens, self.tree)[0])
        return TargetScores(batch, logits, NO_FILTERS, self.seats).sample()

    def draft(self):
        return self.step.drafter.propose(self.gathered(), self.tree)

    def verify(self):
        return self.step.verifier(self.tree, Draft(self.tokens, self.tree), KnownTokens(self))

    def commit(self):
        """The commit after the deepest path was accepted."""
        self.seats.integers.copy_(self.saved)
        cache, batch = self.step.cache, self.gathered()
        if not self.tree.tree.is_chain:
            kv_commit(cache.kv, batch.block_table, batch.committed, self.path, self.num_accepted, cache.num_kv_heads)
        bonus = self.target_tokens[:, 0]
        return self.seats.advance(self.rows, self.hidden, self.tokens, self.path, self.num_accepted, bonus)

    def whole(self):
        """The engine's step, from the same place each time."""
        self.seats.integers.copy_(self.saved)
        return self.step(self.rows)


def pages_needed(batch, context, num_nodes):
    return batch * -(-(context + num_nodes) // PAGE)


def bench_step(settings, device, dtype, command, output=None, commit=None):
    """Measure every line of `settings`. Prints the table, then the JSON object, which is returned."""
    for nodes in settings.rows:
        best_tree(nodes)  # raises for impossible sizes before any work
    # As in the engine: the root must lie within the model's positions, drafts may lie beyond.
    longest = config_of_shape(settings.shape).max_position_embeddings - 1
    if settings.contexts is None:
        settings = replace(settings, contexts=tuple(c for c in DEFAULT_CONTEXTS if c <= longest) or (longest,))
    if max(settings.contexts) > longest:
        raise ValueError(f"--context {max(settings.contexts)} is beyond {settings.shape}: at most {longest} fit")
    check_fits(settings.shape, device, dtype)
    report = Report("step", COLUMNS, device, command, vars(settings), output, commit)
    reach = max(settings.contexts) + max(settings.rows)
    decoder = random_decoder(settings.shape, device, dtype, reach, settings.as_module)
    device = decoder.device
    bandwidth, weights = copy_bandwidth(device), weight_bytes(decoder)
    release(device)
    report.state(
        f"{settings.shape}, {str(decoder.dtype).removeprefix('torch.')}, on {report.head['hardware']}: weights of a pass "
        f"{weights / 1e9:.2f} GB, copy {bandwidth / 1e12:.3f} TB/s (bytes read and written)",
        weight_bytes=weights,
        copy_bytes_per_second=round(bandwidth),
        dtype=str(decoder.dtype).removeprefix("torch."),
    )
    if settings.baseline != "none" and not decoder.is_packed:
        report.note("no baseline: the library's step is written for models that run on kernels of their own")
        settings = replace(settings, baseline="none")
    bench = _Bench(settings, decoder, bandwidth, report)
    for context in settings.contexts:
        for batch in settings.batches:
            bench.measure(context, batch)
    return report.finish()


class _Bench:
    """The lines of one context and batch share their cache and the library's keys."""

    def __init__(self, settings, decoder, bandwidth, report):
        self.settings, self.decoder, self.bandwidth, self.report = settings, decoder, bandwidth, report

    def measure(self, context, batch):
        settings, decoder = self.settings, self.decoder
        where = f"context {context}, batch {batch}"
        release(decoder.device)
        most = max(settings.rows)
        cached = kv_bytes(decoder, 1, PAGE) * (pages_needed(batch, context, most) + 1)
        dense = kv_bytes(decoder, batch, context + most) if settings.baseline != "none" else 0
        # The largest other tensors: logits in the model's dtype and in fp32, and the states of the prefix pass.
        rest = batch * most * (decoder.vocab_size * 6 + context // 256 * decoder.num_heads * (decoder.head_dim + 2) * 4)
        free = plannable_bytes(decoder.device)
        if cached + rest > free:
            self.report.note(
                f"{where}: left out, it takes {(cached + rest) / 1e9:.0f} GB and {free / 1e9:.0f} are free"
            )
            return
        if cached + rest + dense > free:
            self.report.note(
                f"{where}: no baseline, its own keys and values of {dense / 1e9:.0f} GB do not fit as well"
            )
            dense = 0
        cache = PagedCache(pages_needed(batch, context, most), *decoder.kv_shape, decoder.device)
        cache.kv.normal_()
        keys = None
        if dense:
            keys = torch.empty(dense // decoder.dtype.itemsize, dtype=decoder.dtype, device=decoder.device).normal_()
        for nodes in settings.rows:
            try:
                forward = self.forward_line(cache, keys, context, batch, nodes)
                if nodes == most and nodes > NUM_HEADS:
                    for layout in settings.lm_heads:
                        self.head_lines(cache, context, batch, nodes, layout, forward)
            except torch.cuda.OutOfMemoryError:
                self.report.note(f"{where}, rows {nodes}: left out, out of memory")
            release(decoder.device)

    def forward_line(self, cache, keys, context, batch, nodes):
        """The target's pass. Returns its milliseconds."""
        decoder, settings = self.decoder, self.settings
        tree = ROOT_ONLY if nodes == 1 else best_tree(nodes)
        standing = StandingRequests(decoder, cache, batch, context, tree, Strict(), NoDrafter())
        work = Repeatable(standing.forward, decoder.device)
        times, shares = work.time(settings.repeats), work.shares()
        del work
        floor = milliseconds(weight_bytes(decoder, batch * nodes) + kv_bytes(decoder, batch, context), self.bandwidth)
        row = self.row(context, batch, nodes, "forward", times, floor)
        if keys is not None:
            row |= self.baseline(keys, context, batch, standing.tree, times)
        self.report.add(row | {"shares": shares})
        self.report.note(f"         {shares_text(shares)}")
        return times.p50

    def baseline(self, keys, context, batch, tree, times):
        """The library's part of a line; only a note if the library fails at this shape."""
        try:
            library = LibraryStep(self.decoder, batch, context, tree, keys, self.settings.baseline)
            found = Repeatable(library, self.decoder.device).time(max(self.settings.repeats // 2, 3))
        except RuntimeError as error:
            self.report.note(f"no baseline: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return {}
        return {
            "library": found.p50,
            "speedup": found.p50 / times.p50,
            "library_times": found.as_dict(),
            "library_attention": library.attention.backend,
        }

    def head_lines(self, cache, context, batch, nodes, layout, forward):
        """The lines of draft, verify rule, commit and whole step, with heads that own their lm_heads or share the target's.

        forward: milliseconds of the target's pass over the same tree. "on top" is the time of the whole step beyond this pass and
        beyond reading the heads' weights once.
        """
        decoder, settings, device = self.decoder, self.settings, self.decoder.device
        needed = NUM_HEADS * decoder.lm_head.nbytes if layout == "own" else 0
        if needed > plannable_bytes(device):
            self.report.note(
                f"context {context}, batch {batch}: no {layout} lm_heads, {needed / 1e9:.0f} GB do not fit"
            )
            return
        head = random_head("medusa", config_of_shape(settings.shape), decoder, NUM_HEADS, layout == "shared")
        drafter = MedusaDrafter(head, decoder)
        standing = StandingRequests(decoder, cache, batch, context, best_tree(nodes), Strict(), drafter)
        own = milliseconds(head.draft_bytes(decoder.lm_head.nbytes)["first"], self.bandwidth)
        for part, work, floor in (
            (f"draft, {layout}", standing.draft, own),
            ("verify", standing.verify, None),
            ("commit", standing.commit, None),
        ):
            if part in ("verify", "commit") and layout != settings.lm_heads[0]:
                continue  # the same work again
            # Many in one graph: the launch of a graph takes as long as the shortest of these.
            several = Repeatable(lambda work=work: [work() for _ in range(SHORT_CALLS)], device, SHORT_CALLS)
            self.report.add(self.row(context, batch, nodes, part, several.time(settings.repeats), floor))
            del several
        work = Repeatable(standing.whole, device)
        times, shares = work.time(settings.repeats), work.shares()
        read = weight_bytes(decoder, batch * nodes) + kv_bytes(decoder, batch, context)
        floor = own + milliseconds(read, self.bandwidth)
        row = self.row(context, batch, nodes, f"whole step, {layout}", times, floor)
        self.report.add(row | {"extra": (times.p50 - forward - own) / forward, "head_floor": own, "shares": shares})
        self.report.note(f"         {shares_text(shares)}")

    def row(self, context, batch, nodes, part, times, floor):
        row = {"context": context, "batch": batch, "rows": nodes, "part": part, **times.as_dict(), "floor": floor}
        return row | {"over_floor": None if floor is None else times.p50 / floor}
