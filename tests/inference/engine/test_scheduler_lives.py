"""Whole lives of requests under the scheduler, with fakes: no model, no torch.

FakeEngine plays the device: a cache whose cells hold the hash of the text they were computed from, tables that change only as the
engine would change them, steps that run ahead of what the host has read. So a page read too early, written while shared, lost or
mixed up shows as a wrong hash or a wrong token.
"""

import random
from collections import deque

import pytest

from headstart.inference.engine.request import Status
from headstart.inference.engine.scheduler import Scheduler
from headstart.tests.inference.engine.test_scheduler import build, make

PAGE = 4


def hash_text(text):
    """Hash of every beginning of a text: what the cache should hold at each position."""
    hashes, value = [], 17
    for token in text:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        hashes.append(value)
    return hashes


def draw_next(seed, last_hash):
    """The model: a token out of 30 (0 ends the output) from the text before it and the request's seed."""
    return (last_hash * 31 + seed * 7_919) // 1_009 % 30


def run_alone(request):
    """The output that the request must have, whatever happens to it."""
    text, output = list(request.prompt_token_ids), []
    while len(output) < request.max_new_tokens:
        token = draw_next(request.seed, hash_text(text)[-1])
        text.append(token)
        output.append(token)
        fake = make(request.prompt_token_ids, request.max_new_tokens)
        fake.output_token_ids, fake.stop_checker = output, request.stop_checker
        if request.stop_checker(fake):
            break
    return output


class FakeEngine:
    """Launches steps and reads them `lag` steps later. Every fourth draft token or so is right."""

    def __init__(self, scheduler, lag, rng):
        self.scheduler, self.lag, self.rng = scheduler, lag, rng
        self.cells = [[None] * scheduler.page_size for _ in range(scheduler.num_pages + 1)]
        self.table = {}  # seat -> pages, as the device knows them
        self.rows = {}  # seat -> [request, text whose KV is committed, root, tokens left to emit], as the device knows them
        self.launched = deque()
        self.arrived, self.num_chunk_tokens = [], 0

    def add(self, request):
        self.scheduler.add(request)
        self.arrived.append(request)

    def step(self):
        scheduler = self.scheduler
        before = {request: request.seat for request in scheduler.active}
        step = scheduler.schedule()
        scheduler.check()
        self.check_step(step, before)
        for request in step.grown:
            self.table[request.seat] = list(request.pages)
        results = [self.compute(chunk) for chunk in step.prefill]
        for request in step.decode:
            results.append((request, request.epoch, self.decode(request)))
            request.in_flight += 1
        results = [result for result in results if result]
        if results:
            self.launched.append(results)
        while len(self.launched) > (self.lag if results else 0):
            self.read(self.launched.popleft())
        scheduler.check()
        return step

    def check_step(self, step, before):
        scheduler = self.scheduler
        order = {request: i for i, request in enumerate(self.arrived)}
        queue = [order[request] for request in [*scheduler.active, *scheduler.waiting]]
        assert queue == sorted(queue), "somebody was overtaken"
        assert len(scheduler.active) <= scheduler.max_num_seqs
        counts = [chunk.count for chunk in step.prefill]
        assert all(count > 0 for count in counts)
        assert sum(counts) <= scheduler.max_num_batched_tokens
        for earlier, _ in zip(step.prefill, step.prefill[1:]):
            assert earlier.is_last, "a later prompt was begun before an earlier one was through"
        for chunk in step.prefill:
            request = chunk.request
            assert request.status is Status.PREFILLING
            assert chunk.start == request.committed
            assert chunk.is_last == (chunk.start + chunk.count == len(request.known_token_ids))
        for request in step.decode:
            assert request.status is Status.RUNNING
            assert request.num_remaining > request.in_flight
        assert set(step.admitted) <= set(step.grown)
        assert step.admitted == [request for request in scheduler.active if request not in before]
        for request in step.preempted:
            assert before[request] is not None, "it was not admitted"
            assert request in scheduler.waiting, "admitted again in the step that preempted it"
        assert step.preempted == sorted(step.preempted, key=order.get, reverse=True)
        assert not before or next(iter(before)) not in step.preempted, "the oldest lost its pages"

    def write(self, seat, position, value):
        page = self.table[seat][position // PAGE]
        assert page != 0
        num_holders = self.scheduler.pool.num_holders[page]
        assert num_holders <= 1, "a shared page is written"
        request = self.rows[seat][0]
        if request.seat is not None and request.epoch == self.rows[seat][4]:
            assert num_holders == 1
            assert position >= request.committed, "a committed cell is written"
        self.cells[page][position % PAGE] = value

    def check_cells(self, seat, text):
        for position, value in enumerate(hash_text(text)):
            page = self.table[seat][position // PAGE]
            assert self.cells[page][position % PAGE] == value, "the cache does not hold this text"

    def compute(self, chunk):
        """A chunk of known tokens; with the last one, the first token of an output that has none."""
        request, seat, stop = chunk.request, chunk.request.seat, chunk.start + chunk.count
        known = request.known_token_ids
        self.rows[seat] = [request, known[:stop], None, request.num_remaining, request.epoch]
        self.check_cells(seat, known[: chunk.start])
        for position, value in list(enumerate(hash_text(known)))[chunk.start : stop]:
            self.write(seat, position, value)
        self.num_chunk_tokens += chunk.count
        request.committed += chunk.count
        self.scheduler.committed_advanced(request)
        if not chunk.is_last:
            return None
        request.status = Status.RUNNING
        row = self.rows[seat]
        if request.output_token_ids:
            row[2] = request.output_token_ids[-1]
            return None
        row[2] = draw_next(request.seed, hash_text(known)[-1])
        row[3] -= 1
        request.in_flight += 1
        return request, request.epoch, [row[2]]

    def decode(self, request):
        """A step as the device does it: from its own row, drafts included, at most as many tokens as are left."""
        seat, row = request.seat, self.rows[request.seat]
        text, root, left = row[1], row[2], row[3]
        self.check_cells(seat, text)
        for i in range(self.scheduler.tree_positions):
            self.write(seat, len(text) + i, f"draft {i}")
        wanted, emitted = self.rng.randint(1, self.scheduler.max_emitted), []
        while len(emitted) < max(min(wanted, left), 1):
            text = [*text, root]
            self.write(seat, len(text) - 1, hash_text(text)[-1])
            root = draw_next(request.seed, hash_text(text)[-1])
            emitted.append(root)
        self.rows[seat] = [request, text, root, left - len(emitted), request.epoch]
        return emitted

    def read(self, results):
        for request, epoch, tokens in results:
            if request.finished or request.epoch != epoch:
                continue
            request.in_flight -= 1
            for token in tokens:
                had_output = bool(request.output_token_ids)
                request.append(token)
                request.committed += had_output
                if request.finished:
                    break
            self.scheduler.committed_advanced(request)
            if request.finished:
                self.scheduler.release(request)

    def run(self, max_steps=100_000):
        """Run all requests to their end. The oldest must advance within the steps that it takes to read the work in flight."""
        idle, reached = 0, None
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
            oldest = next((request for request in self.arrived if not request.finished), None)
            now = oldest and (oldest, oldest.committed, len(oldest.output_token_ids))
            idle = idle + 1 if now == reached else 0
            reached = now
            assert idle <= self.lag + 1, "the oldest request stands still"
        raise AssertionError("no end")


# --- lives ---


def simulate(seed, num_requests=30):
    """Random requests under random settings; many begin alike, some are cancelled.  -> the engine at its end"""
    rng = random.Random(seed)
    max_emitted = rng.choice([1, 1, 2, 3, 5])
    tree_positions = max_emitted if max_emitted == 1 else max_emitted + rng.randint(0, 12)
    longest = rng.choice([20, 60, 120])
    least = -(-(longest + tree_positions) // PAGE)
    scheduler = Scheduler(
        num_pages=least + rng.choice([0, 1, 2, 5, 20, 100]),
        page_size=PAGE,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([1, 3, 7, 16, 64, 1000]),
        tree_positions=tree_positions,
        max_emitted=max_emitted,
        enable_prefix_caching=rng.random() < 0.7,
    )
    engine = FakeEngine(scheduler, lag=rng.randint(0, 2), rng=rng)
    beginnings = [[rng.randint(1, 29) for _ in range(longest)] for _ in range(3)]
    cancelled = set()
    for i in range(num_requests):
        length = rng.randint(1, longest - 1)
        prompt = rng.choice(beginnings)[: rng.randint(0, length)]
        few = rng.choice([1, 29])  # prompts of equal tokens have equal pages in different places
        prompt = prompt + [rng.randint(1, few) for _ in range(length - len(prompt))]
        most = longest - length if rng.random() < 0.3 else rng.randint(1, longest - length)
        request = make(prompt, most, seed=i % 7, stops=rng.random() < 0.5)
        for _ in range(rng.choice([1, 1, 1, 4])):
            engine.add(make(prompt, most, seed=i, stops=rng.random() < 0.5) if rng.random() < 0.5 else request)
            request = make(prompt, most, seed=i + 100)
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            if scheduler.has_unfinished:
                engine.step()
        if rng.random() < 0.2 and scheduler.has_unfinished:
            victim = rng.choice([*scheduler.active, *scheduler.waiting])
            cancelled.add(victim)
            scheduler.release(victim)
            assert victim.finished
            scheduler.check()
    engine.run()
    for request in engine.arrived:
        expected = run_alone(request)
        if request in cancelled:
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected, "not what the request says alone"
    assert scheduler.num_free_pages == scheduler.num_pages
    scheduler.check()
    return engine


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_random_lives_end_with_the_outputs_of_solo_runs(first):
    engines = [simulate(seed) for seed in range(first, first + 10)]
    assert sum(engine.scheduler.num_preemptions for engine in engines) > 0
    assert sum(engine.scheduler.num_cached_tokens for engine in engines) > 0


def test_many_requests_with_one_beginning_share_it_under_pressure():
    rng = random.Random(1)
    scheduler = build(
        num_pages=24, page_size=4, max_num_seqs=6, max_num_batched_tokens=32, tree_positions=9, max_emitted=4
    )
    engine = FakeEngine(scheduler, lag=1, rng=rng)
    system = [rng.randint(1, 29) for _ in range(22)]
    for i in range(150):
        prompt = (system if i % 3 else []) + [rng.randint(1, 29) for _ in range(rng.randint(1, 20))]
        engine.add(make(prompt, rng.randint(1, 40), seed=i, stops=True))
    engine.run()
    assert all(request.output_token_ids == run_alone(request) for request in engine.arrived)
    assert scheduler.num_preemptions > 10
    assert scheduler.num_prompt_tokens == sum(len(request.prompt_token_ids) for request in engine.arrived)
    assert scheduler.num_cached_tokens > 1000
    assert scheduler.num_free_pages == 24
