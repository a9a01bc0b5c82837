"""Pages that the scheduler shares between requests that begin alike: which, from where, for how long. No model, no torch."""

from array import array

import pytest

from headstart.inference.engine.pages import FIRST, hash_page
from headstart.inference.engine.request import Status
from headstart.tests.inference.engine.test_scheduler import build, decode_once, make, prefill


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
    mixed = make([2, 2, 2, 2, 5, 6, 7, 8, 9])  # its second page stands in the cache, after another first page
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


def salted(prompt, salt):
    request = make(prompt)
    request.cache_salt = salt
    return request


def test_prompts_share_pages_with_those_of_the_same_salt_only():
    scheduler, text = build(page_size=4, max_num_batched_tokens=100), list(range(1, 15))
    starts = []
    for salt in (None, "a", "b", "a", None, "b"):
        request = salted(text, salt)
        scheduler.add(request)
        step = scheduler.schedule()
        starts.append(step.prefill[0].start)
        prefill(scheduler, step)
        scheduler.release(request)
    assert starts == [0, 0, 0, 12, 12, 12]
    both = [salted([*text[:8], 99], salt) for salt in ("c", "d")]  # in one step, too
    for request in both:
        scheduler.add(request)
    assert [chunk.start for chunk in scheduler.schedule().prefill] == [0, 0]
    scheduler.check()


def test_no_salt_puts_a_prompt_after_the_page_of_another():
    """A salt of the very bytes that a page is named by must not stand for that page."""
    scheduler, text = build(page_size=4), list(range(1, 14))
    first = make(text)
    scheduler.add(first)
    prefill(scheduler, scheduler.schedule())
    named = FIRST + array("q", text[:4]).tobytes()
    assert hash_page(FIRST, text[:4]) == first.page_names[0]
    forged = salted(text[4:], named.decode())
    scheduler.add(forged)
    assert scheduler.schedule().prefill[0].start == 0
    assert not set(forged.pages) & set(first.pages)


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
