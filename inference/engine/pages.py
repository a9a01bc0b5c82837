"""The pool of cache pages: reference counts, and full pages found again by their content. No torch.

A page is free (its content is unused), held (by one or more requests), or idle. An idle page can be taken like a free one, but its
content has a name and may be reused until then. The page that has been idle longest is taken first.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict

FIRST = bytes(32)  # stands for the page before the first one


def hash_page(previous, token_ids):
    """Name of a full page: a digest of its tokens and of the name of the page before it (FIRST if there is none).  -> 32 bytes

    A page's keys and values depend on every token up to its end, and on nothing else. All fields have a fixed width (32 bytes, then
    8 per token), so different inputs are different bytes; digests of different bytes agree with a probability of 2**-256.
    """
    return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=32).digest()


def first_name(salt):
    """What stands for the page before the first one of prompts with a salt (a text): they share pages among themselves only.

    blake2b's `person` keeps it apart from every page's name, also where a salt is made of the bytes that a page's name is made of.
    """
    return FIRST if salt is None else hashlib.blake2b(salt.encode(), digest_size=32, person=b"cache salt").digest()


class PagePool:
    """Pages 1..num_pages. Page 0 is never handed out: padding points to it."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.free = list(range(num_pages, 0, -1))
        self.idle = OrderedDict()  # page -> None, the longest idle first
        self.num_holders = [0] * (num_pages + 1)
        self.page_of, self.name_of = {}, {}  # name -> page and back, for held and idle pages with known content

    @property
    def num_free(self):
        """Pages that `take` can hand out, idle ones included."""
        return len(self.free) + len(self.idle)

    def take(self):
        """A page for one holder, its content undefined. An idle page loses its name only when no other page is free."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.page_of[self.name_of.pop(page)]
        self.num_holders[page] = 1
        return page

    def hold(self, page):
        """Add a holder to a named page."""
        assert page in self.name_of
        self.idle.pop(page, None)
        self.num_holders[page] += 1

    def let_go(self, page):
        """Remove a holder; after the last one the page is idle if it has a name, else free."""
        assert self.num_holders[page] > 0
        self.num_holders[page] -= 1
        if self.num_holders[page]:
            return
        if page in self.name_of:
            self.idle[page] = None
        else:
            self.free.append(page)

    def name(self, page, name):
        """Name a held page's content, so that `find` finds it. If another page already has this name, that page keeps it."""
        assert self.num_holders[page] > 0
        if name not in self.page_of and page not in self.name_of:
            self.page_of[name], self.name_of[page] = page, name

    def find(self, name):
        """The page of that name, or None."""
        return self.page_of.get(name)

    def forget(self):
        """Make every idle page free."""
        for page in self.idle:
            del self.page_of[self.name_of.pop(page)]
        self.free += self.idle
        self.idle.clear()

    def start_over(self):
        """Take all pages back from their holders, whatever broke off half-way. Only names that are whole stay."""
        named = {page: name for page, name in reversed(self.name_of.items()) if self.page_of.get(name) == page}
        self.name_of, self.page_of = named, {name: page for page, name in named.items()}
        self.idle = OrderedDict.fromkeys(named)
        self.free = [page for page in range(self.num_pages, 0, -1) if page not in named]
        self.num_holders = [0] * (self.num_pages + 1)

    def is_idle(self, page):
        return page in self.idle

    def check(self, page_lists):
        """Assert that every page is free, idle or held exactly as often as `page_lists` name it, and that none is lost."""
        held = Counter(page for pages in page_lists for page in pages)
        assert all(len(set(pages)) == len(pages) for pages in page_lists), "a request holds a page twice"
        assert sorted([*self.free, *self.idle, *held]) == list(range(1, self.num_pages + 1)), (
            "a page is lost or doubled"
        )
        assert Counter({page: n for page, n in enumerate(self.num_holders) if n}) == held, "holders and lists disagree"
        assert {page: name for name, page in self.page_of.items()} == self.name_of, "names are not one to one"
        assert all(page in self.name_of for page in self.idle), "an idle page has no name"
        assert not any(page in self.name_of for page in self.free), "a free page has a name"
