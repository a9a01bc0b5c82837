"""The line of threads at one engine, with a step that only counts."""

import os
import random
import signal
import threading
import time

import pytest

from headstart.inference import line as line_module
from headstart.inference.line import Call, Line


class CountingStep:
    """A step that notes who is inside, so that two drivers at once are seen."""

    def __init__(self):
        self.inside, self.num_taken, self.together = [], 0, 0

    def __call__(self):
        thread = threading.get_ident()
        try:
            self.inside.append(thread)
            self.together += len(set(self.inside)) > 1
            time.sleep(0.00002)
            self.num_taken += 1
        finally:
            if thread in self.inside:  # as in the line: no interrupt comes before it has left
                self.inside.remove(thread)
        return self.num_taken


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ends(thread):
    thread.join(20)
    return not thread.is_alive()


def wait_until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.001)


def num_places(line):
    return len(line._places)


def test_the_first_steps_and_hands_over_without_delay(monkeypatch):
    monkeypatch.setattr(line_module, "LOOK_AGAIN", 1000)  # nobody wakes without a ring
    line, step, ended, release = Line(), CountingStep(), [], threading.Event()

    def drive(name):
        line.drive(Call(), step, lambda taken: taken is not None and (name or release.is_set()))
        ended.append(name)

    threads = [start(lambda: drive(0))]
    wait_until(lambda: num_places(line) == 1)
    for name in (1, 2, 3):
        threads.append(start(lambda name=name: drive(name)))
        wait_until(lambda: num_places(line) == len(threads))
    release.set()
    assert all(map(ends, threads))
    assert ended == [0, 1, 2, 3]
    assert step.together == num_places(line) == 0


def test_errands_are_done_before_the_next_step_or_at_once():
    line, done, release = Line(), [], threading.Event()
    line.between_steps(lambda: done.append("at once"))
    assert done == ["at once"]
    inside, go_on = threading.Event(), threading.Event()

    def step():
        inside.set()
        go_on.wait(20)

    driver = start(lambda: line.drive(Call(), step, lambda _: release.is_set()))
    inside.wait(20)
    line.between_steps(lambda: done.append("later"))
    assert line.unless_driven(lambda: "nobody drives") is None
    assert done == ["at once"]
    go_on.set()
    wait_until(lambda: "later" in done)
    release.set()
    assert ends(driver)
    assert line.unless_driven(lambda: "nobody drives") == "nobody drives"


def test_an_errand_that_comes_while_the_last_driver_leaves_is_done():
    line, done = Line(), []

    def enough(_):
        line.between_steps(lambda: done.append(1))
        return True

    line.drive(Call(), lambda: None, enough)
    assert done == [1]


def test_an_error_in_an_errand_leaves_a_line_that_goes_on():
    line = Line()
    with pytest.raises(ZeroDivisionError):
        line.between_steps(lambda: 1 / 0)
    assert line.drive(Call(), lambda: 7, lambda _: True) == 7


@pytest.fixture
def alarms():
    """alarms(work, seconds, longest): run work() again and again, each time until a SIGINT-like signal.  -> their number"""

    def alarms(work, seconds, longest):
        generator, number, limit = random.Random(0), 0, time.monotonic() + seconds
        try:
            while time.monotonic() < limit:
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.random() * longest + 1e-6)
                    while True:
                        work()
                except KeyboardInterrupt:
                    number += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return number

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield alarms
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_has_left_the_line(alarms):
    """Later calls would wait for ever behind a place that nobody holds."""
    line = Line()

    def work():
        line.drive(Call(), lambda: 1, lambda _: True)
        line.between_steps(lambda: None)

    assert alarms(work, 2, 1e-4) > 1000
    assert num_places(line) == 0


def test_interrupts_at_any_place_leave_a_line_that_goes_on(alarms):
    """SIGINT at random moments of the main thread, which joins, drives, waits, runs errands and leaves, while others do so, too."""
    line, step, stop, turns, errands = Line(), CountingStep(), threading.Event(), [0] * 3, []

    def work(place):
        generator = random.Random(place)
        while not stop.is_set():
            left = [generator.randrange(1, 5)]

            def enough(taken, left=left):
                left[0] -= taken is not None
                return left[0] <= 0

            line.drive(Call(), step, enough)
            line.between_steps(lambda: errands.append(1))
            turns[place] += 1

    threads = [start(lambda place=place: work(place)) for place in range(3)]
    asked = []

    def ask():
        line.drive(Call(), step, lambda taken: taken is not None)
        line.between_steps(lambda: errands.append(1))
        asked.append(1)

    interrupted = alarms(ask, 3, 0.002)
    seen = list(turns)
    wait_until(lambda: all(now > then + 3 for now, then in zip(turns, seen)))
    stop.set()
    assert all(map(ends, threads))
    assert interrupted > 100
    assert step.together == num_places(line) == 0
    line.between_steps(lambda: errands.append(1))
    assert not line._errands
    assert len(errands) > len(asked) + sum(turns)


def test_a_call_within_a_call_of_one_thread_is_refused():
    line = Line()

    def enough(_):
        with pytest.raises(RuntimeError, match="this thread is in a call on the LLM already"):
            line.drive(Call(), lambda: None, lambda _: True)
        return True

    line.drive(Call(), lambda: None, enough)
    assert num_places(line) == 0


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have():
    line, release = Line(), threading.Event()
    driver = start(lambda: line.drive(Call(), lambda: release.wait(20), lambda _: True))
    wait_until(lambda: num_places(line) == 1)
    child = os.fork()
    if child == 0:
        try:
            line.drive(Call(), lambda: None, lambda _: True)
        except RuntimeError as error:
            os._exit(7 if "when the process forked" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    release.set()
    assert ends(driver)
    assert os.waitstatus_to_exitcode(status) == 7
