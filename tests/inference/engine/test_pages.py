"""The page pool with fakes: no model, no torch."""

import random

import pytest

from headstart.inference.engine.pages import FIRST, PagePool, hash_page


def test_every_page_but_the_padding_is_handed_out_once():
    pool = PagePool(5)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.check([taken])
    for page in taken:
        pool.let_go(page)
    assert pool.num_free == 5
    pool.check([])


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2)
    page = pool.take()
    pool.name(page, b"a")
    pool.hold(page)
    pool.let_go(page)
    assert pool.num_free == 1
    pool.check([[page]])
    pool.let_go(page)
    assert pool.num_free == 2
    assert pool.is_idle(page)


def test_idle_pages_are_found_again_and_given_up_longest_idle_first():
    pool = PagePool(4)
    pages = {name: pool.take() for name in (b"a", b"b", b"c")}
    for name, page in pages.items():
        pool.name(page, name)
    for name in (b"b", b"a", b"c"):
        pool.let_go(pages[name])
    fourth = pool.take()
    assert fourth not in pages.values()  # a page without content goes first
    assert pool.find(b"b") == pages[b"b"]
    pool.hold(pool.find(b"b"))  # used again: now the newest
    pool.let_go(pages[b"b"])
    assert [pool.take() for _ in range(3)] == [pages[b"a"], pages[b"c"], pages[b"b"]]
    assert pool.find(b"a") is pool.find(b"b") is pool.find(b"c") is None
    assert pool.num_free == 0


def test_of_two_pages_with_the_same_content_the_first_stays_known():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.name(first, b"a")
    pool.name(second, b"a")
    assert pool.find(b"a") == first
    pool.let_go(second)
    assert not pool.is_idle(second)
    pool.check([[first]])


def test_a_page_is_named_by_everything_up_to_its_end_and_nothing_else():
    page = list(range(64))
    first = hash_page(FIRST, page)
    as_tokens = [int.from_bytes(first[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
    names = [
        first,
        hash_page(first, page),  # the same tokens, later in the text
        hash_page(hash_page(FIRST, page[::-1]), page),  # after other tokens
        hash_page(FIRST, [1, *page[1:]]),
        hash_page(FIRST, [1, 0, *page[2:]]),
        hash_page(FIRST, [0x0100000000000000, *page[1:]]),  # the byte of token 1 in another place
        hash_page(FIRST, page[:-1]),
        hash_page(FIRST, [*as_tokens, *page]),  # a name written as tokens
    ]
    assert len(set(names)) == len(names)
    assert hash_page(FIRST, tuple(page)) == first


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_lose_no_page(seed):
    rng = random.Random(seed)
    pool, holders, names = PagePool(rng.randint(1, 12)), [], 0
    for _ in range(2000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            holders.append([pool.take() for _ in range(rng.randint(1, pool.num_free))])
        elif action < 0.6 and holders:
            pages = rng.choice(holders)
            names += 1
            pool.name(rng.choice(pages), names if rng.random() < 0.7 else rng.randint(0, names))
        elif action < 0.7 and pool.page_of:
            page = pool.find(rng.choice(list(pool.page_of)))
            pool.hold(page)
            holders.append([page])
        elif holders:
            for page in holders.pop(rng.randrange(len(holders))):
                pool.let_go(page)
        pool.check(holders)
    for pages in holders:
        for page in pages:
            pool.let_go(page)
    assert pool.num_free == pool.num_pages
    pool.check([])


def test_the_checker_sees_what_it_is_for():
    def broken(breaking):
        pool = PagePool(3)
        pages = [pool.take(), pool.take()]
        pool.name(pages[0], b"a")
        lists = [pages]
        breaking(pool, lists)
        return pool, lists

    breakages = [
        lambda pool, lists: pool.free.pop(),
        lambda pool, lists: pool.free.append(lists[0][0]),
        lambda pool, lists: pool.free.append(0),
        lambda pool, lists: lists.append([lists[0][0]]),
        lambda pool, lists: lists[0].append(lists[0][0]),
        lambda pool, lists: lists.clear(),
        lambda pool, lists: pool.name_of.clear(),
        lambda pool, lists: pool.name_of.update({pool.free[0]: b"b"}) or pool.page_of.update({b"b": pool.free[0]}),
        lambda pool, lists: pool.idle.update({lists[0].pop(): None}),
    ]
    pool, lists = broken(lambda pool, lists: None)
    pool.check(lists)
    for breaking in breakages:
        pool, lists = broken(breaking)
        with pytest.raises(AssertionError):
            pool.check(lists)
