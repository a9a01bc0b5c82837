"""CUDA graphs of the step and of prompts: captured once for each number of rows, and replayed.

A graph of the step takes a number of batch rows (`graph_sizes`); rows without a request point to the padding seat. Known tokens of
prompts have graphs of their own and graphs beside the rows of a step, which read the weights once for both (`known_sizes`). How
many known tokens a step may take beside streams follows from what these graphs take, measured after the capture.

All graphs share one memory pool, so the results of a replay must be read before the next replay; stream order ensures that. A step
whose requests need more than a temperature has its own graphs. They are captured at the start, too, if the model's own generation
config asks for them; else at first use, and again when a request needs a table (logit_state.py) that did not exist before. Those
captured so late take no known tokens beside.
"""

import gc
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import torch

from .prompt_passes import MAX_CHUNKS, KnownRows
from .target_scores import NO_FILTERS, next_filters

FEW_ROWS = 64  # up to here the weights are what a pass costs
TILE = 128  # rows of a tile of the products above
KNOWN_TOKENS = (128, 256, 384, 512, 640, 768, 1024)  # about so many in a graph
# Also, for prompts alone on several ranks, or through a module: the host launches kernels more slowly than they are computed.
MORE_TOKENS = 1536, 2048
PACE = 2.4  # a step with known tokens may take so many times the same step without
# Where nobody waits for a step, it takes this part of the known tokens that wait. Then hardly a step goes without them, and rows
# beside known tokens cost less than rows alone. By a model of the step's time that meets four measured rates within 3 %
# (docs/log.md), 256 requests in 64 seats make 4 % more tokens than with as many known tokens in a step as a graph holds.
SHARE = 1 / 4


def graph_sizes(max_num_seqs):
    """Numbers of batch rows that get a graph of their own.  40 -> [1, 2, 4, 8, 16, 24, 32, 40]"""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        last = sizes[-1]
        sizes.append(min(2 * last if last < 8 else last + max(8, 1 << (last.bit_length() - 3)), max_num_seqs))
    return sizes


def known_sizes(rows, most):
    """Numbers of known tokens that get a graph beside `rows` rows of a step; together they fill tiles.  64 -> [64, 192, 320 ...]

    most: known tokens of one pass, so no graph is much larger.
    """
    least = rows + min(max(16, rows // 8), KNOWN_TOKENS[-1])
    least = FEW_ROWS if least <= FEW_ROWS else -(-least // TILE) * TILE
    counts = [count for count, lower in zip(KNOWN_TOKENS, (0, *KNOWN_TOKENS)) if lower < most]
    totals = {least, *((rows + count) // TILE * TILE for count in counts)}
    return [total - rows for total in sorted(totals) if total >= least]


def prompt_sizes(decoder, most):
    """Numbers of known tokens that get a graph of their own, beside no step."""
    sizes = known_sizes(0, most)
    if decoder.ranks.size > 1 or not decoder.is_packed:
        largest = -(-most // TILE) * TILE
        sizes += [min(count, largest) for lower, count in pairwise((KNOWN_TOKENS[-1], *MORE_TOKENS)) if lower < most]
    return sizes


def ends_early(decoder, drafter):
    """Whether known tokens can stop before the last layer's MLP: nobody reads what leaves it but of each prompt's last token."""
    reads_it = drafter.keeps_keys and (not drafter.streams or len(decoder.layers) in drafter.streams)
    return decoder.is_packed and decoder.is_whole and not reads_it


@contextmanager
def _no_collection():
    """No garbage is collected inside this context: freeing the graphs of an engine breaks a capture off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class StepGraphs:
    """Runs a Step for any number of requests: through a graph of the smallest size that holds them, or directly.

    steps: Steps of one engine that differ in their trees, the largest first; captured: False runs every step directly (always so
    where there is no GPU); max_known: the most known tokens of one pass.
    """

    def __init__(self, steps, max_num_seqs, captured=True, max_known=0):
        self.steps, self.sizes = steps, graph_sizes(max_num_seqs)
        self.captured = captured and self.step.seats.device.type == "cuda"
        self.num_captures = 0
        self._graphs = {}  # (rows, filters, which step, known rows) -> (graph, static row numbers, output)
        self._rows = {}  # same key -> the seats that the static row numbers hold now
        self._num_tables = 0  # of LogitState, when the filtered graphs were captured
        self._seconds = {}  # (rows, which step, known rows) -> of a replay for padding alone
        self._seconds_per_token = 0.0  # of a step, to read the keys and values of one committed token
        # One pool and one stream for all graphs: memory freed by one capture can be used by the next only on the same stream.
        self._pool = self._stream = None
        # Beside known tokens rows are dear, so of several depths the nearest to half of the tree's is drafted there (of two as near
        # the smaller), or none.
        depths, self.smallest = [step.tree.max_depth for step in steps], len(steps) - 1
        drafting = [which for which, depth in enumerate(depths) if depth]
        first = min(
            drafting, key=lambda which: (abs(2 * depths[which] - depths[0]), depths[which]), default=self.smallest
        )
        self.mixed = sorted({first, self.smallest})  # which steps have graphs with known tokens beside
        self.mixed_sizes = {which: self._sizes_beside(steps[which].tree.num_nodes) for which in self.mixed}
        self.mixed_filters = {NO_FILTERS}  # kinds of steps that have graphs with known tokens beside
        self._known = {}  # (batch rows, which step), rows 0 for known tokens alone -> KnownRows beside them, the smallest first
        if self.captured and max_known:
            rows = {}  # one for each size: graphs run one after the other
            places = [(size, which) for which, sizes in self.mixed_sizes.items() for size in sizes]
            for size, which in [(0, self.smallest), *places]:
                nodes = size * steps[which].tree.num_nodes
                sizes = known_sizes(nodes, max_known) if size else prompt_sizes(self.step.decoder, max_known)
                for known in sizes:
                    rows.setdefault(known, KnownRows(known, self.step.seats, self.step.drafter))
                self._known[size, which] = [rows[known] for known in sizes]
            if ends_early(self.step.decoder, self.step.drafter):
                room = self.step.decoder.new_unfinished(max(rows))
                for step in steps:
                    step.unfinished = room

    def _sizes_beside(self, nodes):
        """Numbers of batch rows of so many nodes that get graphs with known tokens: where they are few, padding costs little."""
        few = max([size for size in self.sizes if size * nodes <= FEW_ROWS], default=1)
        # Powers of two and what lies halfway between: 16, 24, 32, 48, 64.
        coarse = {size for size in self.sizes if size % (1 << max(size.bit_length() - 2, 0)) == 0}
        return [size for size in self.sizes if size >= few and size in coarse | {self.sizes[-1]}]

    def capture(self, progress=lambda keys: keys, filters=NO_FILTERS):
        """Make the graphs of all sizes, for requests with such filters, too. Largest first: it sizes the pool."""
        if not self.captured:
            return
        self.mixed_filters = {NO_FILTERS, filters}
        keys = [(size, NO_FILTERS, which, 0) for size in self.sizes for which in range(len(self.steps))]
        keys += [(size, NO_FILTERS, which, known.size) for (size, which), held in self._known.items() for known in held]
        filtered = [(size, filters, *rest) for size, _, *rest in keys if filters and size]
        for key in progress(sorted(keys + filtered, key=self._num_rows, reverse=True)):
            self._graph(*key)
        if self._known:
            for size, _, which, known in keys:
                if which in self.mixed:
                    self._seconds[size, which, known] = self._time(self._graphs[size, NO_FILTERS, which, known][0])
            # A step of one request reads the weights, and hardly anything else.
            decoder, cache = self.step.decoder, self.step.cache
            token_bytes = cache.kv[:, :, : cache.num_kv_heads].nbytes
            per_token = self._seconds[self.sizes[0], self.smallest, 0] * token_bytes / decoder.weight_bytes
            # Ranks schedule alike, so they go by what one of them has measured.
            *seconds, self._seconds_per_token = decoder.ranks.of_first([*self._seconds.values(), per_token])
            self._seconds = dict(zip(self._seconds, seconds, strict=True))

    @property
    def step(self):
        """The step with the largest tree."""
        return self.steps[0]

    @property
    def max_chunks(self):
        """The most chunks of prompts that a pass should take: None if no graph takes them."""
        return MAX_CHUNKS if self._known else None

    def num_scores(self, max_known):
        """Rows of scores [V] that the graphs of one kind of filters hold, if they are kept: one for each token that may be emitted.

        max_known: as above. They are counted whether or not graphs are captured.
        """
        places = [step.tree.max_depth + 1 for step in self.steps]
        count = sum(self.sizes) * sum(places)
        for which, sizes in self.mixed_sizes.items():
            nodes = self.steps[which].tree.num_nodes
            count += places[which] * sum(size * len(known_sizes(size * nodes, max_known)) for size in sizes)
        return count

    def seconds_beside(self, requests, plan):
        """What each step that has graphs with known tokens adds to their time, for these running requests: {which: seconds}

        By the largest graph of each. All 0 where there are no such graphs, or where the plan of depths does not go by times.
        """
        if not (self._known and plan.measures):
            return dict.fromkeys(self.mixed, 0.0)
        alone = [(held.size, self._seconds[0, self.smallest, held.size]) for held in self._known[0, self.smallest]]
        contexts, found = self._seconds_per_token * sum(request.committed for request in requests), {}
        for which in self.mixed:
            size = self._size(len(requests), which)
            known = self._known[size, which][-1].size
            whole, seconds = next((one for one in alone if one[0] >= known), alone[-1])
            found[which] = self._seconds[size, which, known] - seconds * known / whole + contexts
        return found

    def known_rows(self, count, num_requests=0, which=None):
        """The smallest KnownRows that hold so many tokens beside so many requests in one of the steps, or None."""
        place = (self._size(num_requests, which), which) if num_requests else (0, self.smallest)
        return next((known for known in self._known.get(place, ()) if known.size >= count), None)

    def known_budget(self, requests, entering, plan):
        """The most known tokens of entering requests that a step of these running requests should take; None: no limit.

        Beside a stream: the most whose graph takes at most PACE times the step alone, what the requests' contexts take included; at
        least those of the smallest graph, so that prompts go on. Else nobody waits for the step: where a stream enters, as many as
        a graph holds, and a part of what waits (SHARE) where none does, so that the next steps have some, too.
        """
        if not self._known:
            return None
        which = plan.best_beside(len(requests), self.seconds_beside(requests, plan))
        contexts = self._seconds_per_token * sum(request.committed for request in requests)
        alone = self._seconds[self._size(len(requests)), which, 0]
        place, before, share = (self._size(len(requests), which), which), 0.0, SHARE
        if max(map(next_filters, requests)) not in self.mixed_filters:
            place, before, share = (0, self.smallest), alone, 1  # the known tokens' graph reads the weights anew
        held = self._known[place]
        if not any(request.is_streamed for request in requests):
            waiting = sum(request.num_known - request.computed for request in entering)
            wanted = waiting * (1 if any(request.is_streamed for request in entering) else share)
            return next((known.size for known in held if known.size >= wanted), held[-1].size)
        limit = PACE * (alone + contexts) - contexts - before
        return max([known.size for known in held if self._seconds[*place, known.size] <= limit], default=held[0].size)

    def run(self, seats, filters, which=0, known=None):
        """Run one of the steps for the requests in `seats` (a host list), and KnownRows beside.

        -> StepOutput, whose first len(seats) rows are theirs
        """
        if not self.captured:
            return self.steps[which](self.step.seats.on_device(seats), filters)
        size = self._size(len(seats), None if known is None else which)
        if filters:
            self._forget_outdated()
        key = (size, filters, which, known.size if known else 0)
        graph, rows, output = self._graph(*key)
        padded = seats + [self.step.seats.padding_seat] * (size - len(seats))
        if self._rows[key] != padded:
            self._rows[key] = None  # unknown, if this breaks off
            rows.copy_(torch.tensor(padded).pin_memory(), non_blocking=True)
            self._rows[key] = padded
        graph.replay()
        return output

    def run_known(self, known):
        """Run KnownRows alone.  -> KnownOutput"""
        graph, _, output = self._graph(0, NO_FILTERS, self.smallest, known.size)
        graph.replay()
        return output

    def _size(self, num_requests, which=None):
        """The fewest batch rows that hold so many requests; which: of a step with known tokens beside."""
        return next(size for size in (self.sizes if which is None else self.mixed_sizes[which]) if size >= num_requests)

    def _num_rows(self, key):
        size, _, which, known = key
        return size * self.steps[which].tree.num_nodes + known

    def _forget_outdated(self):
        """Drop graphs captured before the newest table of the logits was made: they hold addresses, and would ignore that table."""
        now = self.step.seats.logit_state.num_tables
        if now != self._num_tables:
            if any(key[1] for key in self._graphs):
                torch.cuda.synchronize(self.step.seats.device)  # the newest replay may still be running
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
            self.mixed_filters = {NO_FILTERS}
            self._num_tables = now

    def _graph(self, *key):
        if key not in self._graphs:
            self._rows[key] = [self.step.seats.padding_seat] * key[0]
            self._graphs[key] = self._capture(*key)
        return self._graphs[key]

    def _capture(self, size, filters, which, known):
        step, device = self.steps[which], self.step.seats.device
        rows = torch.full((size,), self.step.seats.padding_seat, device=device)
        known = next(rows for rows in self._known[size, which] if rows.size == known) if known else None

        def work():
            return step(rows, filters, known) if size else step.compute(known)

        # A run before the capture compiles the kernels; rows without a request change nothing.
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = work()
        self._pool = self._pool or graph.pool()
        self.num_captures += 1
        return graph, rows, output

    def _time(self, graph, repeats=3):
        """Seconds of a replay for padding alone, which changes nothing."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
        for mark in marks:
            mark.record()
            graph.replay()
        torch.cuda.synchronize(self.step.seats.device)
        return median(a.elapsed_time(b) for a, b in pairwise(marks[1:])) / 1e3
