"""Rows that are read ahead of the step: train/data/packed/row_reader.py."""

import threading

import numpy as np
import pytest
import torch

from headstart.train.data.packed.packing import lay_out
from headstart.train.data.packed.row_reader import RowReader
from headstart.train.data.rows import select_rows
from headstart.train.loss.distillation import find_labels

T, DEPTHS = 16, 3


@pytest.fixture
def packed():
    random = np.random.default_rng(0)
    lengths = random.integers(2, T + 4, 40)
    return lay_out([(random.integers(9, size=n).tolist(), (random.random(n) < 0.7).tolist()) for n in lengths], T)


class Watched:
    """Rows that note who asks for which, and fail at some."""

    def __init__(self, packed, bad=()):
        self.packed, self.bad, self.asked = packed, bad, []

    def select(self, index):
        self.asked.append((threading.current_thread().name.partition("_")[0], list(index)))
        if set(index) & set(self.bad):
            raise OSError(f"rows {list(index)} cannot be read")
        return self.packed.select(index)


def check(found, packed, index):
    inputs, labels, features = found
    assert features is None
    *expected, supervised = select_rows(packed, index, torch.device("cpu"))
    assert all(map(torch.equal, inputs, expected)), "no other rows than those that were asked for"
    wanted = find_labels(expected[0], expected[2], supervised, DEPTHS)
    assert all(torch.equal(getattr(labels, name), getattr(wanted, name)) for name in ("positions", "tokens", "valid"))


def test_rows_and_labels_are_those_of_the_index_whatever_was_announced(packed):
    asked = [[0, 3], [5, 1], [5, 1], [2, 4], [6], [0, 3]]
    announced = [[5, 1], [5, 1], [9, 9], None, [0, 3], None]  # the third one is wrong, the fourth one missing
    with RowReader(packed, DEPTHS, "cpu") as reader:
        for index, following in zip(asked, announced):
            following = None if following is None else np.array(following)
            check(reader.read(np.array(index), following), packed, index)


def test_what_was_announced_is_read_by_the_thread_and_once(packed):
    watched = Watched(packed)
    with RowReader(watched, DEPTHS, "cpu") as reader:
        reader.read([0, 1], [2, 3])
        reader.read([2, 3], [4, 5])
        reader.read([4, 5])
    main = threading.current_thread().name.partition("_")[0]
    assert watched.asked == [(main, [0, 1]), ("rows", [2, 3]), ("rows", [4, 5])]
    (thread,) = reader.thread._threads
    assert not thread.is_alive()


def test_cached_features_come_from_the_thread_as_well(packed):
    read_by = []

    class Cache:
        def read(self, index, pinned):
            read_by.append(threading.current_thread().name.partition("_")[0])
            return {"states": torch.tensor(index), "pinned": pinned}

        def features(self, kept, device):
            return kept["states"] * 2, kept["pinned"], device

    with RowReader(packed, DEPTHS, "cpu") as reader:
        reader.cache = Cache()
        for index, following in ([0, 1], [2, 3]), ([2, 3], None):
            features, pinned, device = reader.read(index, following)[2]
            assert features.tolist() == [2 * row for row in index]
            assert (pinned, device) == (False, torch.device("cpu"))
    assert read_by == [threading.current_thread().name.partition("_")[0], "rows"]


def test_after_wait_nothing_is_being_read(packed):
    begin, ended = threading.Event(), threading.Event()

    class Slow(Watched):
        def select(self, index):
            if list(index) == [7]:
                begin.wait(10)
                ended.set()
            return super().select(index)

    with RowReader(Slow(packed), DEPTHS, "cpu") as reader:
        reader.wait()  # nothing was announced
        reader.read([0], [7])
        threading.Timer(0.05, begin.set).start()
        reader.wait()
        assert ended.is_set()
        check(reader.read([7]), packed, [7])


def test_rows_that_cannot_be_read_fail_where_they_are_asked_for(packed):
    with RowReader(Watched(packed, bad=[7]), DEPTHS, "cpu") as reader:
        reader.read([0], [7])
        with pytest.raises(OSError, match="cannot be read"):
            reader.read([7], [1])
        check(reader.read([1], [7]), packed, [1])
        check(reader.read([2]), packed, [2])  # others than those that failed: nothing is raised


@pytest.mark.gpu
def test_a_gpu_gets_the_same_rows_while_it_is_busy(packed):
    device = torch.device("cuda")
    work = torch.zeros(4096, 4096, device=device)
    order = [np.array([row % len(packed), (3 * row) % len(packed)]) for row in range(60)]
    with RowReader(packed, DEPTHS, device) as reader:
        found = []
        for index, following in zip(order, [*order[1:], None]):
            for _ in range(4):
                work = work @ work  # copies wait for it, and must not find their memory overwritten
            found.append(reader.read(index, following))
    for index, (inputs, labels, _) in zip(order, found):
        on_host = (getattr(labels, name).cpu() for name in ("positions", "tokens", "valid"))
        check(([one.cpu() for one in inputs], type(labels)(*on_host), None), packed, index)
