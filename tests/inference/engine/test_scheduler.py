"""The scheduler, one rule at a time: admission, decoding, preemption, cancelling. No model, no torch.

Pages that requests share: test_prefix_reuse.py. Whole lives of requests, against a fake device: test_scheduler_lives.py.
"""

import itertools
from collections import deque

import pytest

from headstart.inference.engine.request import Request, Status
from headstart.inference.engine.scheduler import Scheduler

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


# --- admission ---


def decode_once(scheduler, request, tokens=(5,)):
    """Do as the engine does when the tokens of one step arrive."""
    had_output = bool(request.output_token_ids)
    request.output_token_ids += tokens
    request.committed += len(tokens) if had_output else len(tokens) - 1
    scheduler.committed_advanced(request)


def prefill(scheduler, step):
    """Do as the engine does when the chunks of a step are launched."""
    for chunk in step.prefill:
        chunk.request.committed += chunk.count
        scheduler.committed_advanced(chunk.request)
        if chunk.is_last:
            chunk.request.status = Status.RUNNING


def test_requests_are_admitted_in_order_while_seats_and_pages_last():
    scheduler = build(num_pages=8, max_num_seqs=3, tree_positions=4)
    requests = [make(100, seed=0), make(100, seed=1), make(300, seed=2), make(10, seed=3)]  # 2, 2, 5 and 1 pages
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    assert step.admitted == step.grown == requests[:2]  # the third does not fit, and the fourth does not overtake it
    assert step.decode == step.preempted == []
    assert [request.seat for request in requests] == [0, 1, None, None]
    pages = [page for request in requests for page in request.pages]
    assert len(set(pages)) == 4
    assert 0 not in pages
    prefill(scheduler, step)
    scheduler.release(requests[0])
    step = scheduler.schedule()
    assert step.admitted == requests[2:]
    assert step.decode == [requests[1]]
    assert [request.seat for request in requests] == [None, 1, 0, 2]
    assert scheduler.num_free_pages == 0
    scheduler.check()


def test_admission_asks_for_pages_of_the_known_tokens_and_one_tree_not_of_a_whole_life():
    scheduler = build(num_pages=20, tree_positions=29)
    request = make(100, new=1000)
    scheduler.add(request)
    scheduler.schedule()
    assert len(request.pages) == 3  # 129 positions


def test_a_request_that_can_never_fit_is_refused_at_once_and_told_what_would():
    scheduler = build(num_pages=2, tree_positions=64)
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
        build(tree_positions=3, max_emitted=4)


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


def test_prompts_beside_running_requests_have_a_budget_of_their_own():
    scheduler, asked = build(max_num_batched_tokens=100), []
    requests = [make(count, seed=i) for i, count in enumerate((30, 200, 90))]

    def known_budget(running, entering):
        asked.append((len(running), sum(request.num_known - request.computed for request in entering)))
        return 64

    counts = []
    for _ in range(6):
        for request in requests[:1] if not counts else requests[1:] if len(counts) == 1 else []:
            scheduler.add(request)
        step = scheduler.schedule(known_budget)
        counts.append([chunk.count for chunk in step.prefill])
        prefill(scheduler, step)
    assert counts == [[30], [64], [64], [64], [8, 56], [34]]
    assert asked == [(1, 290), (1, 226), (1, 162), (1, 98), (2, 34)]


def test_a_budget_is_asked_for_prompts_that_can_enter():
    """Two seats, five requests: the first runs, the second is told of, with what is left of it; nothing is asked once it runs."""
    scheduler, asked = build(max_num_seqs=2, max_num_batched_tokens=100), []

    def known_budget(running, entering):
        asked.append([request.seed for request in entering])
        return 40

    for seed in range(5):
        scheduler.add(make(60, new=8, seed=seed))
    for _ in range(4):
        prefill(scheduler, scheduler.schedule(known_budget))
    assert asked == [[1]]


def test_others_may_join_the_queue_while_a_step_is_scheduled():
    seeds = itertools.count(3)

    class Queue(deque):
        def __getitem__(self, place):
            self.append(make(10, seed=next(seeds)))  # as another thread does at any time
            return super().__getitem__(place)

        def __iter__(self):
            for request in super().__iter__():
                self.append(make(10, seed=next(seeds)))
                yield request

    scheduler = build(max_num_seqs=4)
    scheduler.add(make(10, new=8, seed=0))
    prefill(scheduler, scheduler.schedule())
    scheduler.waiting = Queue(make(10, seed=seed) for seed in (1, 2))
    step = scheduler.schedule(lambda running, entering: 64)
    assert [chunk.request.seed for chunk in step.prefill] == [1, 2, 3]


def test_a_pass_has_at_most_so_many_chunks():
    scheduler = build(max_num_seqs=5, max_num_batched_tokens=100)
    for seed in range(5):
        scheduler.add(make(60, seed=seed))
    counts = []
    for _ in range(4):
        step = scheduler.schedule(max_chunks=2)
        counts.append([chunk.count for chunk in step.prefill])
        prefill(scheduler, step)
    assert counts == [[60, 40], [20, 60], [60, 40], [20]]


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
    scheduler = build(page_size=64, tree_positions=20, max_emitted=10)
    request = make(90, new=100)
    scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    request.in_flight = in_flight
    step = scheduler.schedule()
    assert len(request.pages) == pages  # 110, 120, 130, 190, 200 positions; never more than 220, its longest life
    assert step.grown == ([request] if pages > 2 else [])


def test_a_request_as_long_as_the_cache_waits_until_its_steps_are_read():
    scheduler = build(num_pages=3, page_size=4, tree_positions=5, max_emitted=5)
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
    scheduler = build(num_pages=4, page_size=4, tree_positions=6, max_emitted=6)
    first, second = make(1, new=9, seed=0), make(1, new=1, seed=1)
    for request in (first, second):
        scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    decode_once(scheduler, first, (1, 2, 3, 4, 5))
    first.in_flight = 1
    step = scheduler.schedule()  # 17 positions if the step in flight emits 6 tokens
    assert step.decode == [second]
    assert step.preempted == []


def test_who_waited_through_a_step_that_broke_off_is_counted_when_admitted():
    scheduler = build(max_num_seqs=1)
    first, second = make(6, seed=0), make(5, seed=1)
    for request in (first, second):
        scheduler.add(request)
    prefill(scheduler, scheduler.schedule())
    scheduler.start_over()
    assert scheduler.schedule().admitted == [first]
    assert scheduler.num_prompt_tokens == 6
    assert (second.epoch, second.times.scheduled_ts) == (1, 0)
    scheduler.release(first)
    assert scheduler.schedule().admitted == [second]
    assert scheduler.num_prompt_tokens == 11
    assert second.times.scheduled_ts >= second.times.queued_ts > 0


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
    after = make(2, seed=9)
    scheduler.add(after)
    decode_once(scheduler, first, (6, 7))  # 8 tokens: its next position opens a page
    tokens = list(third.output_token_ids)
    step = scheduler.schedule()
    assert step.preempted == [third]
    assert step.decode == [first, second]
    assert step.grown == [first]
    assert step.admitted == []  # although the pages left would do for the one after it
    assert list(scheduler.waiting) == [third, after]
    assert (third.status, third.seat, third.pages, third.committed, third.in_flight) == (Status.WAITING, None, [], 0, 0)
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
    scheduler, (first, second, third) = fill(tree_positions=1)
    scheduler.tree_positions = 18  # a tree that fills the whole cache
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
