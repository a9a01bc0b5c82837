"""Session: the order in which prompts that were given together start; pauses. (Threads, streams, interrupts: the files beside.)"""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from headstart import LLM, SamplingParams
from headstart.inference import frozen_heap
from headstart.inference.line import Call
from headstart.inference.session import Session

pytestmark = pytest.mark.usefixtures("thawed_heap")


def test_the_last_batch_starts_with_its_longest_outputs_and_has_the_seeds_of_its_places(target_folder):
    lengths = [3, 9, 2, 12, 1, 12, 7]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = ["a", "b", "c", "d", "e", "f", "g"]
    together = LLM(str(target_folder), dtype="float32", seed=3, max_num_seqs=4, max_num_batched_tokens=1)
    outputs = together.generate(prompts, params)
    started = sorted(range(7), key=lambda i: outputs[i].metrics.scheduled_ts)
    assert started == [0, 1, 2, 3, 5, 6, 4]  # of equal lengths, as they were given
    one_by_one = LLM(str(target_folder), dtype="float32", seed=3, max_num_seqs=1)
    for prompt, param, output in zip(prompts, params, outputs):
        (alone,) = one_by_one.generate([prompt], param)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.request_id == output.request_id


def test_prompts_without_a_limit_start_before_those_with_one(target_folder):
    llm = LLM(str(target_folder), dtype="float32", max_num_seqs=2, max_num_batched_tokens=1, max_model_len=40)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, None)]
    outputs = llm.generate([[5] * 20, [6] * 20], params)
    assert outputs[1].metrics.scheduled_ts < outputs[0].metrics.scheduled_ts


def test_no_collection_walks_what_was_there_before_a_call_and_all_is_collected_after_it(target_folder):
    llm, seen = LLM(str(target_folder), dtype="float32"), []

    alive = []
    old = Cycle(alive)
    gc.collect()  # what is young goes before a call
    del old

    def note(_):
        gc.collect()
        seen.append(alive[0]() is not None)
        return seen[2:]

    call = Call()
    llm.session.submit("a", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), call)
    llm.session.drive(call, note)
    llm.session.leave(call)
    assert seen == [True] * 3
    gc.collect()
    assert alive[0]() is None
    assert gc.get_freeze_count() == 0


def test_outputs_of_a_call_are_made_while_no_collection_walks_what_was_there_before(target_folder, monkeypatch):
    llm, counts, output = LLM(str(target_folder), dtype="float32"), [], Session.output
    monkeypatch.setattr(
        Session, "output", lambda session, given: counts.append(gc.get_freeze_count()) or output(session, given)
    )
    llm.generate(["a", "b"], SamplingParams(temperature=0.0, max_tokens=2, logprobs=1))
    assert min(counts) > 1000
    assert len(counts) == 2
    assert gc.get_freeze_count() == 0


def test_a_heap_that_the_program_froze_stays_frozen(target_folder, monkeypatch):
    llm, counted, count = LLM(str(target_folder), dtype="float32"), [], gc.get_freeze_count
    monkeypatch.setattr(frozen_heap, "_looks_again", 0.0)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    gc.freeze()
    try:
        for _ in range(3):
            llm.generate(["a"], SamplingParams(temperature=0.0, max_tokens=2))
        assert len(counted) == 1  # counting walks the heap
        assert count() > 1000
    finally:
        gc.unfreeze()
    frozen_heap._looks_again = 0.0  # as after a minute
    with frozen_heap.frozen_heap():
        assert count() > 1000
    assert count() == 0


class Cycle:
    """Only a collection frees one."""

    def __init__(self, alive):
        self.itself = self
        alive.append(weakref.ref(self))


def test_garbage_of_a_loop_of_calls_is_collected():
    alive, most = [], 0
    for _ in range(300):
        for _ in range(20):
            Cycle(alive)
        with frozen_heap.frozen_heap():
            pass
        alive = [one for one in alive if one() is not None]
        most = max(most, len(alive))
    assert most < 200


def test_old_garbage_is_collected_once_in_a_while(monkeypatch):
    alive = []
    kept = Cycle(alive)
    gc.collect()  # it is old now
    del kept
    with frozen_heap.frozen_heap():
        pass
    assert alive[0]() is not None
    monkeypatch.setattr(frozen_heap, "_last_full", time.monotonic() - 2 * frozen_heap.INTERVAL)
    with frozen_heap.frozen_heap():
        pass
    assert alive[0]() is None


def test_a_call_that_begins_while_another_begins_freezes_nothing(monkeypatch):
    """The first would take the heap for the program's, and freeze none for a minute; at its end the second would thaw it."""
    program_froze, inside, leave = frozen_heap._program_froze, threading.Event(), threading.Event()

    def call():
        with frozen_heap.frozen_heap():
            inside.set()
            assert leave.wait(60)

    other = threading.Thread(target=call)

    def meanwhile():
        monkeypatch.setattr(frozen_heap, "_program_froze", program_froze)
        other.start()
        assert inside.wait(60)
        return program_froze()

    monkeypatch.setattr(frozen_heap, "_program_froze", meanwhile)
    with frozen_heap.frozen_heap():
        leave.set()
        other.join()
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == frozen_heap._looks_again == 0


def test_an_interrupt_as_a_call_begins_keeps_no_later_call_from_freezing(monkeypatch):
    class Interrupted(dict):
        def setdefault(self, *given):
            super().setdefault(*given)
            raise KeyboardInterrupt

    taken = Interrupted()
    monkeypatch.setattr(frozen_heap, "_outermost", taken)
    with pytest.raises(KeyboardInterrupt), frozen_heap.frozen_heap():
        pass
    assert taken == {}


def test_a_process_that_is_to_end_walks_no_objects(tmp_path):
    """Python's end does, unless it is told."""
    script = "import gc\nfrom headstart.inference.frozen_heap import end_without_collecting\n"
    script += "class Told:\n    def __del__(self):\n        print('collected')\n"
    script += "gc.disable()\none = Told()\none.itself = one\ndel one\n"
    for last, printed in (("", "collected\n"), ("end_without_collecting()", "")):
        done = subprocess.run([sys.executable, "-c", script + last], capture_output=True, text=True, check=True)
        assert done.stdout == printed
