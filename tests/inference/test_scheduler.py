"""The scheduler with fakes: no model, no torch.

FakeEngine plays the device: a cache whose cells hold the hash of the text they were computed from, tables that change only as the
engine would change them, steps that run ahead of what the host has read. So a page read too early, written while shared, lost or
mixed up shows as a wrong hash or a wrong token.
"""

import random
from collections import deque

import pytest

from headstart.inference.request import Request, Status
from headstart.inference.scheduler import Scheduler

PAGE = 4
END = 0  # the token that ends an output


def make(prompt, new=10, seed=0, stops=False):
    if isinstance(prompt, int):
        prompt = [1000 * (seed + 1) + i for i in range(prompt)]
    return Request(
        request_id=seed,
        prompt_token_ids=prompt,
        params=None,
        seed=seed,
        sample_index=0,
        max_new_tokens=new,
        stop_checker=lambda request: True if stops and request.output_token_ids[-1] == END else None,
    )


def build(num_pages=100, page_size=64, max_num_seqs=8, max_num_batched_tokens=10_000, **settings):
    return Scheduler(num_pages, page_size, max_num_seqs, max_num_batched_tokens, **settings)


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
        self.table = {}  # slot -> pages, as the device knows them
        self.rows = {}  # slot -> [request, text whose KV is committed, root, tokens left to emit], as the device knows them
        self.launched = deque()
        self.arrived, self.num_chunk_tokens = [], 0

    def add(self, request):
        self.scheduler.add(request)
        self.arrived.append(request)

    def step(self):
        scheduler = self.scheduler
        before = {request: request.slot for request in scheduler.active}
        step = scheduler.schedule()
        scheduler.check()
        self.check_step(step, before)
        for request in step.grown:
            self.table[request.slot] = list(request.pages)
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

    def write(self, slot, position, value):
        page = self.table[slot][position // PAGE]
        assert page != 0
        num_holders = self.scheduler.pool.num_holders[page]
        assert num_holders <= 1, "a shared page is written"
        request = self.rows[slot][0]
        if request.slot is not None and request.epoch == self.rows[slot][4]:
            assert num_holders == 1
            assert position >= request.committed, "a committed cell is written"
        self.cells[page][position % PAGE] = value

    def check_cells(self, slot, text):
        for position, value in enumerate(hash_text(text)):
            page = self.table[slot][position // PAGE]
            assert self.cells[page][position % PAGE] == value, "the cache does not hold this text"

    def compute(self, chunk):
        """A chunk of known tokens; with the last one, the first token of an output that has none."""
        request, slot, stop = chunk.request, chunk.request.slot, chunk.start + chunk.count
        known = request.known_token_ids
        self.rows[slot] = [request, known[:stop], None, request.num_remaining, request.epoch]
        self.check_cells(slot, known[: chunk.start])
        for position, value in list(enumerate(hash_text(known)))[chunk.start : stop]:
            self.write(slot, position, value)
        self.num_chunk_tokens += chunk.count
        request.committed += chunk.count
        self.scheduler.committed_advanced(request)
        if not chunk.is_last:
            return None
        request.status = Status.RUNNING
        row = self.rows[slot]
        if request.output_token_ids:
            row[2] = request.output_token_ids[-1]
            return None
        row[2] = draw_next(request.seed, hash_text(known)[-1])
        row[3] -= 1
        request.in_flight += 1
        return request, request.epoch, [row[2]]

    def decode(self, request):
        """A step as the device does it: from its own row, drafts included, at most as many tokens as are left."""
        slot, row = request.slot, self.rows[request.slot]
        text, root, left = row[1], row[2], row[3]
        self.check_cells(slot, text)
        for i in range(self.scheduler.tree_slots):
            self.write(slot, len(text) + i, f"draft {i}")
        wanted, emitted = self.rng.randint(1, self.scheduler.max_emitted), []
        while len(emitted) < max(min(wanted, left), 1):
            text = [*text, root]
            self.write(slot, len(text) - 1, hash_text(text)[-1])
            root = draw_next(request.seed, hash_text(text)[-1])
            emitted.append(root)
        self.rows[slot] = [request, text, root, left - len(emitted), request.epoch]
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
        """To the end of all requests. The oldest must come forward within the steps it takes to read what is in flight."""
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
    tree_slots = max_emitted if max_emitted == 1 else max_emitted + rng.randint(0, 12)
    longest = rng.choice([20, 60, 120])
    least = -(-(longest + tree_slots) // PAGE)
    scheduler = Scheduler(
        num_pages=least + rng.choice([0, 1, 2, 5, 20, 100]),
        page_size=PAGE,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([1, 3, 7, 16, 64, 1000]),
        tree_slots=tree_slots,
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
    scheduler = build(num_pages=24, page_size=4, max_num_seqs=6, max_num_batched_tokens=32, tree_slots=9, max_emitted=4)
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


# --- admission ---


def decode_once(scheduler, request, tokens=(5,)):
    """What the engine does when the tokens of one step arrive."""
    had_output = bool(request.output_token_ids)
    request.output_token_ids += tokens
    request.committed += len(tokens) if had_output else len(tokens) - 1
    scheduler.committed_advanced(request)


def prefill(scheduler, step):
    """What the engine does when the chunks of a step are launched."""
    for chunk in step.prefill:
        chunk.request.committed += chunk.count
        scheduler.committed_advanced(chunk.request)
        if chunk.is_last:
            chunk.request.status = Status.RUNNING


def test_requests_are_admitted_in_order_while_slots_and_pages_last():
    scheduler = build(num_pages=8, max_num_seqs=3, tree_slots=4)
    requests = [make(100, seed=0), make(100, seed=1), make(300, seed=2), make(10, seed=3)]  # 2, 2, 5 and 1 pages
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert step.admitted == step.grown == requests[:2]  # the third does not fit, and the fourth does not overtake it
    assert step.decode == step.preempted == []
    assert [request.slot for request in requests] == [0, 1, None, None]
    pages = [page for request in requests for page in request.pages]
    assert len(set(pages)) == 4
    assert 0 not in pages
    prefill(scheduler, step)
    scheduler.release(requests[0])
    step = scheduler.schedule()
    assert step.admitted == requests[2:]
    assert step.decode == [requests[1]]
    assert [request.slot for request in requests] == [None, 1, 0, 2]
    assert scheduler.num_free_pages == 0
    scheduler.check()


def test_admission_asks_for_pages_of_the_known_tokens_and_one_tree_not_of_a_whole_life():
    scheduler = build(num_pages=20, tree_slots=29)
    request = make(100, new=1000)
    scheduler.add(request)
    scheduler.schedule()
    assert len(request.pages) == 3  # 129 positions


def test_a_request_that_can_never_fit_is_refused_at_once_and_told_what_would():
    scheduler = build(num_pages=2, tree_slots=64)
    with pytest.raises(
        ValueError, match=r"60 tokens and 5 new ones need 3 pages of 64 .* holds 2: .* together may be 64"
    ):
        scheduler.add(make(60, new=5))
    assert not scheduler.has_unfinished
    scheduler.add(make(60, new=4))


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "max_emitted"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        build(**{name: 0})


def test_a_tree_too_small_for_its_tokens_is_refused():
    with pytest.raises(ValueError, match="a tree of 3 nodes emits at most as many tokens, got max_emitted=4"):
        build(tree_slots=3, max_emitted=4)


def test_prompt_tokens_of_a_step_stay_within_the_budget_in_order():
    scheduler = build(max_num_batched_tokens=100)
    first, second, third = (make(count, seed=i) for i, count in enumerate((230, 50, 40)))
    for request in (first, second, third):
        scheduler.add(request)
    seen = []
    for _ in range(5):
        step = scheduler.schedule()
        seen.append([(chunk.request, chunk.start, chunk.count, chunk.is_last) for chunk in step.prefill])
        prefill(scheduler, step)
    assert seen == [
        [(first, 0, 100, False)],
        [(first, 100, 100, False)],
        [(first, 200, 30, True), (second, 0, 50, True), (third, 0, 20, False)],
        [(third, 20, 20, True)],
        [],
    ]


# --- decoding ---


def test_a_request_decodes_from_the_step_after_its_prefill_until_its_tokens_are_all_under_way():
    scheduler = build()
    request = make(10, new=4)
    scheduler.add(request)
    step = scheduler.schedule()
    prefill(scheduler, step)
    assert step.decode == []
    request.in_flight = 1  # the first token, not read yet
    for _ in range(3):
        assert scheduler.schedule().decode == [request]
        request.in_flight += 1
    assert scheduler.schedule().decode == []  # every step emits at least one token
    request.in_flight -= 1
    assert scheduler.schedule().decode == [request]


@pytest.mark.parametrize(("in_flight", "pages"), [(0, 2), (1, 2), (2, 3), (8, 3), (9, 4), (50, 4)])
def test_pages_cover_the_longest_a_request_can_be_behind_the_steps_in_flight(in_flight, pages):
    scheduler = build(page_size=64, tree_slots=20, max_emitted=10)
    request = make(90, new=100)
    scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    request.in_flight = in_flight
    step = scheduler.schedule()
    assert len(request.pages) == pages  # 110, 120, 130, 190, 200 positions; never more than 220, its longest life
    assert step.grown == ([request] if pages > 2 else [])


def test_a_request_as_long_as_the_cache_waits_until_its_steps_are_read():
    scheduler = build(num_pages=3, page_size=4, tree_slots=5, max_emitted=5)
    request = make(1, new=6)
    scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    for token in range(4):
        assert scheduler.schedule().decode == [request]
        decode_once(scheduler, request, (token,))
    request.in_flight = 1
    step = scheduler.schedule()  # 14 positions if the step in flight emits 5 tokens
    assert step.decode == step.preempted == []
    request.in_flight = 0
    assert scheduler.schedule().decode == [request]


def test_nobody_gives_way_for_more_pages_than_there_are():
    scheduler = build(num_pages=4, page_size=4, tree_slots=6, max_emitted=6)
    first, second = make(1, new=9, seed=0), make(1, new=1, seed=1)
    for request in (first, second):
        scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    decode_once(scheduler, first, (1, 2, 3, 4, 5))
    first.in_flight = 1
    step = scheduler.schedule()  # 17 positions if the step in flight emits 6 tokens
    assert step.decode == [second]
    assert step.preempted == []


# --- preemption ---


def fill(num_requests=3, num_pages=6, **settings):
    """Running requests of two pages each that fill the cache."""
    scheduler = build(num_pages=num_pages, page_size=4, **settings)
    requests = [make(6, new=12, seed=i) for i in range(num_requests)]
    for request in requests:
        scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    for request in requests:
        decode_once(scheduler, request)
    assert scheduler.num_free_pages == num_pages - 2 * num_requests
    return scheduler, requests


def test_the_youngest_gives_its_pages_to_an_older_one_and_goes_to_the_front_of_the_queue():
    scheduler, (first, second, third) = fill()
    behind = make(2, seed=9)
    scheduler.add(behind)
    decode_once(scheduler, first, (6, 7))  # 8 tokens: its next position opens a page
    tokens = list(third.output_token_ids)
    step = scheduler.schedule()
    assert step.preempted == [third]
    assert step.decode == [first, second]
    assert step.grown == [first]
    assert step.admitted == []  # although the pages left would do for the one behind it
    assert list(scheduler.waiting) == [third, behind]
    assert (third.status, third.slot, third.pages, third.committed, third.in_flight) == (Status.WAITING, None, [], 0, 0)
    assert third.epoch == 1
    assert third.output_token_ids == tokens
    assert scheduler.num_preemptions == 1
    scheduler.check()


def test_a_preempted_request_computes_all_its_tokens_but_the_newest_again():
    scheduler, (first, second, third) = fill(enable_prefix_caching=False)
    decode_once(scheduler, third, (6, 7))
    decode_once(scheduler, first, (6, 7))
    assert scheduler.schedule().preempted == [third]
    scheduler.release(first)
    scheduler.release(second)
    step = scheduler.schedule()
    (chunk,) = step.prefill
    assert (chunk.request, chunk.start, chunk.count, chunk.is_last) == (third, 0, 8, True)
    assert third.known_token_ids == [*third.prompt_token_ids, 5, 6]
    assert scheduler.num_prompt_tokens == 18  # counted once
    prefill(scheduler, step)
    assert scheduler.schedule().decode == [third]


def test_the_youngest_reads_its_steps_in_flight_before_it_gives_up_its_own_pages():
    scheduler, (first, second, third) = fill()
    for request in (first, second):
        request.in_flight = 1
    third.committed, third.output_token_ids = 8, [5, 5, 5]
    third.in_flight = 1
    step = scheduler.schedule()
    assert step.preempted == []
    assert step.decode == [first, second]  # the third waits for its token
    third.in_flight = 0
    step = scheduler.schedule()
    assert step.preempted == [third]  # read, and still no page: drawing on would be in vain
    assert step.decode == [first, second]


def test_pages_are_taken_from_as_many_as_it_takes_but_never_from_the_oldest():
    scheduler, (first, second, third) = fill(tree_slots=1)
    scheduler.tree_slots = 18  # a tree that fills the whole cache
    step = scheduler.schedule()
    assert step.preempted == [third, second]
    assert step.decode == [first]
    assert list(scheduler.waiting) == [second, third]
    assert len(first.pages) == 6
    scheduler.check()


def test_cached_pages_that_nobody_holds_go_before_anyone_is_preempted():
    scheduler = build(num_pages=6, page_size=4)
    old = make(8, new=1, seed=5)
    scheduler.add(old)
    prefill(scheduler, scheduler.schedule())
    scheduler.release(old)
    assert len(scheduler.pool.idle) == 2
    requests = [make(7, new=9, seed=0), make(7, new=9, seed=1)]
    for request in requests:
        scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    for request in requests:
        decode_once(scheduler, request, (5, 6))
    step = scheduler.schedule()
    assert step.preempted == []
    assert step.decode == step.grown == requests
    assert scheduler.num_free_pages == 0
    assert not scheduler.pool.idle


# --- prefix reuse ---


def test_a_prompt_that_begins_alike_shares_the_full_pages_and_computes_the_rest():
    scheduler = build(page_size=4)
    text = list(range(1, 15))
    first = make(text)
    scheduler.add(first)
    prefill(scheduler, scheduler.schedule())
    second = make([*text[:10], 99, 98, 97])
    third = make([99, *text[1:]])
    scheduler.add(second)
    scheduler.add(third)
    step = scheduler.schedule()
    assert second.pages[:2] == first.pages[:2]
    assert not set(second.pages[2:]) & set(first.pages)
    assert not set(third.pages) & set(first.pages)
    assert [(chunk.start, chunk.count, chunk.is_last) for chunk in step.prefill] == [(8, 5, True), (0, 14, True)]
    assert scheduler.num_cached_tokens == 8
    assert scheduler.num_prompt_tokens == 14 + 13 + 14
    scheduler.check()
    scheduler.release(first)
    scheduler.check()
    assert scheduler.num_free_pages == 100 - len(set(second.pages)) - len(third.pages)


def test_a_page_is_reused_only_behind_the_same_beginning():
    scheduler = build(page_size=4)
    for prompt in ([1, 1, 1, 1, 5, 6, 7, 8, 9], [2, 2, 2, 2, 3, 3, 3, 3, 9]):
        request = make(prompt)
        scheduler.add(request)
        prefill(scheduler, scheduler.schedule())
        scheduler.release(request)
    mixed = make([2, 2, 2, 2, 5, 6, 7, 8, 9])  # its second page stands in the cache, behind another first page
    scheduler.add(mixed)
    assert scheduler.schedule().prefill[0].start == 4


@pytest.mark.parametrize(("length", "reused"), [(8, 4), (9, 8), (4, 0), (12, 8)])
def test_at_least_one_token_is_left_to_be_computed(length, reused):
    scheduler = build(page_size=4)
    for _ in range(2):
        request = make(length)
        scheduler.add(request)
        step = scheduler.schedule()
        prefill(scheduler, step)
        scheduler.release(request)
    assert step.prefill[0].start == reused
    scheduler.check()


def test_pages_of_generated_tokens_are_shared_once_they_are_full():
    scheduler = build(page_size=4)
    first = make([1, 2, 3])
    scheduler.add(first)
    prefill(scheduler, scheduler.schedule())
    for token in range(4, 10):
        decode_once(scheduler, first, (token,))
        scheduler.schedule()
    assert first.committed == 8  # the newest token, 9, is not among them
    second = make(list(range(1, 11)))
    scheduler.add(second)
    assert scheduler.schedule().prefill[0].start == 8
    assert second.pages[:2] == first.pages[:2]
    decode_once(scheduler, first, (77,))
    assert first.committed == 9
    scheduler.release(first)
    third = make([1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 1, 2, 3])
    scheduler.add(third)
    assert scheduler.schedule().prefill[0].start == 8  # the third page was never full
    scheduler.check()


def test_outputs_of_one_prompt_compute_it_once():
    scheduler = build(page_size=4, max_num_batched_tokens=12)
    requests = [make(list(range(1, 31))) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    num_computed = 0
    for _ in range(4):
        step = scheduler.schedule()
        num_computed += sum(chunk.count for chunk in step.prefill)
        prefill(scheduler, step)
    assert all(request.status is Status.RUNNING for request in requests)
    assert num_computed == 30 + 3 * 2  # 28 tokens in full pages, computed by the first
    assert all(request.pages[:7] == requests[0].pages[:7] for request in requests)
    scheduler.check()


def test_the_end_of_a_long_forgotten_text_is_given_up_before_its_beginning():
    scheduler = build(num_pages=6, page_size=4)
    old = make(16, new=1)
    scheduler.add(old)
    prefill(scheduler, scheduler.schedule())
    pages = list(old.pages)
    scheduler.release(old)
    other = make(14, new=1, seed=3)  # four pages: the two without content, then two of the old ones
    scheduler.add(other)
    scheduler.schedule()
    assert other.pages[2:] == [pages[3], pages[2]]
    scheduler.release(other)
    again = make(16, new=1)
    scheduler.add(again)
    assert scheduler.schedule().prefill[0].start == 8
    assert again.pages[:2] == pages[:2]


def test_without_prefix_caching_nothing_is_shared_or_kept():
    scheduler = build(page_size=4, enable_prefix_caching=False)
    requests = [make(12) for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert [chunk.count for chunk in step.prefill] == [12, 12, 12]
    prefill(scheduler, step)
    scheduler.check()
    for request in requests:
        scheduler.release(request)
    assert len(scheduler.pool.free) == 100
    assert scheduler.num_cached_tokens == 0


# --- cancelling ---


def test_a_request_can_be_released_in_any_state():
    scheduler, (first, second, third) = fill()
    scheduler.release(second)
    scheduler.check()
    decode_once(scheduler, first, (6, 7))
    decode_once(scheduler, third, (6, 7))
    waiting = make(2, seed=8)
    scheduler.add(waiting)
    prefilling = scheduler.schedule().admitted
    assert prefilling == []
    scheduler.release(waiting)
    scheduler.release(third)
    scheduler.release(third)  # twice does no harm
    scheduler.release(first)
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.num_free_pages == 6
    assert all(request.finished for request in (first, second, third, waiting))


def test_a_preempted_request_can_be_cancelled_while_it_waits():
    scheduler, (first, _, third) = fill()
    decode_once(scheduler, first, (6, 7))
    assert scheduler.schedule().preempted == [third]
    scheduler.release(third)
    assert not scheduler.waiting
    scheduler.check()
