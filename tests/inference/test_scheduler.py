"""The scheduler with fakes: no model, no torch."""

from types import SimpleNamespace

import pytest

from headstart.inference.request import Status
from headstart.inference.scheduler import Scheduler


def make(prompt, new=10):
    return SimpleNamespace(prompt_token_ids=[0] * prompt, max_new_tokens=new, status=Status.WAITING, pages=[])


def test_requests_are_admitted_in_order_while_slots_and_pages_last():
    scheduler = Scheduler(num_pages=6, page_size=64, max_num_seqs=3, tree_slots=4)
    requests = [make(100), make(100), make(200), make(10)]  # 2, 2, 4 and 1 pages
    for request in requests:
        scheduler.add(request)
    prefilling, running = scheduler.schedule()
    assert prefilling == requests[:2]  # the third does not fit, and the fourth does not overtake it
    assert running == []
    pages = [page for request in prefilling for page in request.pages]
    assert len(set(pages)) == 4
    assert 0 not in pages
    requests[0].status = Status.RUNNING
    assert scheduler.schedule() == ([requests[1]], [requests[0]])
    scheduler.release(requests[0])
    prefilling, _ = scheduler.schedule()
    assert prefilling == [requests[1], requests[2]]
    assert len(requests[2].pages) == 4


def test_no_page_is_lost_or_held_twice():
    scheduler = Scheduler(num_pages=10, page_size=64, max_num_seqs=4, tree_slots=1)
    for i in range(50):
        scheduler.add(make(1 + i % 130))
    while scheduler.has_unfinished:
        scheduler.schedule()
        held = [page for request in scheduler.active for page in request.pages]
        assert sorted(held + scheduler.free_pages) == list(range(1, 11))
        scheduler.release(scheduler.active[len(held) % len(scheduler.active)])
    assert sorted(scheduler.free_pages) == list(range(1, 11))


def test_a_request_that_can_never_fit_is_refused_at_once():
    scheduler = Scheduler(num_pages=2, page_size=64, max_num_seqs=1, tree_slots=64)
    with pytest.raises(ValueError, match="needs 3 pages of 64 tokens and the cache holds 2"):
        scheduler.add(make(100))
    assert not scheduler.has_unfinished
