"""Choose the depth of the next step's drafts, from the measured cost and acceptance of each depth. No torch.

Drafting pays while a batch leaves the device room: the larger the batch, the more a drafted node costs, and text that is hard to
predict pays less. So the engine holds the same tree cut at a few depths (0: no drafts) and measures two things as it runs: seconds
per step for each depth and bucket of batch sizes, and how often a path reaches each depth, over all buckets. It takes the depth
with the most tokens per second. Now and then it tries another depth, to learn whether the best has changed. Beside prompts it goes
by what a step of each depth adds to their time, which the engine measured when it was built. Outputs do not depend on the choice:
`strict` keeps their bits, the ratio rules their distribution.

Some heads say how sure they are of a draft (DSpark's confidence). What they say of the last few drafts, beside what they said on
average, tells how much easier the text at hand is than the text so far: how often a depth is reached is multiplied by the quotient
of the two. So it does not matter whether the confidence is right, only whether it rises where more is accepted.
"""

from itertools import zip_longest

MEMORY = 0.05  # weight of the newest measurement in a running average
# of one request's step in how often a depth is reached that the step before drafted, too: more follows chance
STEADY = 0.01
LATELY = 0.2  # weight of one request's step in what its text is like now, by the confidence
FIRST = 4  # steps of a depth before it is compared with others
FIRST_REQUESTS = 64  # steps of single requests before a depth's acceptance counts beside prompts
PROBE_EVERY = 64  # steps of a bucket between two trials of a depth other than the best


def depths_to_try(max_depth):
    """Cuts of a tree of this depth: none, one level, half (rounded up and down) and all.  5 -> [5, 3, 2, 1, 0]"""
    return sorted({max_depth, -(-max_depth // 2), max_depth // 2, 1, 0}, reverse=True)


def buckets(max_num_seqs):
    """Numbers of rows that get a graph of their own.  6 -> [1, 2, 4, 6]"""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes


class RunningAverage:
    def __init__(self):
        self.value, self.count = 0.0, 0

    def add(self, value, memory=MEMORY):
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, memory)


class Adaptive:
    """Chooses among depths by measured cost and acceptance.

    depths: falling, the last one may be 0; buckets: batch sizes that are told apart, rising
    """

    measures = True  # whether steps are recorded, with their seconds

    def __init__(self, depths, buckets):
        self.depths, self.buckets = list(depths), list(buckets)
        self.seconds = {(size, depth): RunningAverage() for size in buckets for depth in depths}
        # How often a path got to depth 1, 2, ..., how often it should have by its confidence, and by that of the last few drafts.
        self.reached, self.claimed, self.lately = ([RunningAverage() for _ in range(max(depths))] for _ in range(3))
        self._last_depth = 0
        self._steps, self._beside = dict.fromkeys(buckets, 0), 0
        self._probed = dict.fromkeys(buckets, 0)  # which of the depths is tried next

    def choose(self, num_requests):
        """Index in `depths` of the depth for a step of `num_requests` requests."""
        size = self._bucket(num_requests)
        for place, depth in enumerate(self.depths):
            if self.seconds[size, depth].count < FIRST:
                return place
        self._steps[size] += 1
        if self._steps[size] % PROBE_EVERY:
            return self.best(num_requests)
        # All depths in turn, the best one included.
        self._probed[size] = (self._probed[size] + 1) % len(self.depths)
        return self._probed[size]

    def best(self, num_requests):
        """Index in `depths` of the depth with the most tokens per second among those measured; the greatest if none is."""
        size = self._bucket(num_requests)
        measured = [place for place, depth in enumerate(self.depths) if self.seconds[size, depth].count >= FIRST]
        return max(measured, key=lambda place: self.rate(size, self.depths[place]), default=0)

    def choose_beside(self, num_requests, seconds):
        """Index in `depths` of the depth for a step with prompt tokens.

        seconds: {index: what a step of that depth and of so many requests adds to the time of the prompt tokens alone}
        """
        self._beside += 1
        return self.best_beside(num_requests, seconds) if self._beside % PROBE_EVERY else min(seconds)

    def best_beside(self, num_requests, seconds):
        """The same without tries. Until FIRST_REQUESTS paths could have got there, it is the greatest depth."""
        deepest = min(seconds)
        if self.depths[deepest] and self.reached[self.depths[deepest] - 1].count < FIRST_REQUESTS:
            return deepest
        return max(seconds, key=lambda place: self._tokens(self.depths[place]) / max(seconds[place], 1e-9))

    def rate(self, size, depth):
        """Expected tokens per second and request with drafts of this depth in a bucket."""
        return self._tokens(depth) / max(self.seconds[size, depth].value, 1e-9)

    def _tokens(self, depth):
        """Expected tokens of a request's step."""
        return 1 + sum(map(self._chance, range(depth)))

    def _chance(self, level):
        """How likely a path gets to a depth, from 0, of the text at hand. For depths below the last draft's the last one's ease."""
        shown = min(level, max(self._last_depth - 1, 0))
        ease = self.lately[shown].value / self.claimed[shown].value if self.claimed[shown].value else 1.0
        return min(self.reached[level].value * ease, 1.0)

    def record(self, num_requests, place, seconds, accepted, confidence=()):
        """Record a step of `num_requests` requests; accepted: number of accepted tokens of each request.

        seconds: its time, None for a step whose time tells nothing about its depth; confidence: each request's draft's, that a path
        gets to depth 1, 2, ...; none where the drafter has none.
        """
        size, depth = self._bucket(num_requests), self.depths[place]
        if seconds is not None:
            self.seconds[size, depth].add(seconds)
        for count, sure in zip_longest(accepted, confidence):
            for level in range(depth):
                memory = STEADY if level < self._last_depth else MEMORY
                self.reached[level].add(float(count > level), memory)
                if sure is not None:
                    self.claimed[level].add(sure[level], memory)
                    self.lately[level].add(sure[level], LATELY)
        if not depth:  # nothing is known of the text at hand: it is taken for what it is on average, more and more
            for lately, claimed in zip(self.lately, self.claimed):
                if claimed.count:
                    lately.add(claimed.value, LATELY)
        self._last_depth = depth

    def _bucket(self, num_requests):
        return next(size for size in self.buckets if size >= num_requests)


class _GivenDepths:
    """A plan that is told its depths, and measures nothing."""

    measures = False

    def choose(self, num_requests):
        """Index in `depths` of the depth for a step of `num_requests` requests."""
        return self.best(num_requests)

    def best_beside(self, num_requests, seconds):
        """The same for a step with prompt tokens, among the keys of `seconds`: no deeper than without."""
        return min(place for place in seconds if place >= self.best(num_requests))

    choose_beside = best_beside


class PerBatchSize(_GivenDepths):
    """Depths given by the user: {smallest batch size: depth}, of a tree of max_depth."""

    def __init__(self, depth_of, max_depth):
        self.depth_of = dict(sorted(depth_of.items()))
        self.depths = sorted({max_depth, *self.depth_of.values()}, reverse=True)

    def best(self, num_requests):
        depth = [depth for size, depth in self.depth_of.items() if size <= num_requests][-1]
        return self.depths.index(depth)


class OneDepth(_GivenDepths):
    """The whole tree in every step."""

    def __init__(self, depth):
        self.depths = [depth]

    def best(self, _):
        return 0
