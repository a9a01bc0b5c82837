"""Calls of several threads on one LLM: they share its batch, and each gets the tokens that it gets alone."""

import asyncio
import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from headstart import LLM, SamplingParams
from headstart.evaluation.step_recorder import record_steps
from headstart.inference.engine.request import Request
from headstart.inference.open_batch import OpenBatch

pytestmark = pytest.mark.usefixtures("thawed_heap")
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=[None, DRAFT_MODEL], ids=["plain", "draft_model"])
def shared(request, target_folder):
    speculative = request.param and {"model": str(target_folder), **request.param}
    return LLM(str(target_folder), dtype="float32", device="cpu", max_num_seqs=6, speculative_config=speculative)


@pytest.fixture
def fresh(llm):
    """An LLM whose counters and numbers are its own."""
    return LLM(llm, max_num_seqs=8)


def sampled(seed, length=30, **more):
    return SamplingParams(temperature=1.0, max_tokens=length, seed=seed, ignore_eos=True, **more)


def collect(stream):
    """(pieces, RequestOutput) of a stream."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def ask(llm, seed):
    """One of four kinds of call.  -> the tokens of its outputs"""
    kind, length, prompt = seed % 4, 5 + seed * 7 % 30, [40 + seed % 50] * (1 + seed % 90)
    if kind == 0:
        two = [sampled(seed, length, n=2, logprobs=1), sampled(seed + 1, 3)]
        outputs = llm.generate([prompt, "second"], two)
        assert [len(one.logprobs) for one in outputs[0].outputs] == [length, length]
    elif kind == 1:
        pieces, output = collect(llm.stream(prompt, sampled(seed, length, stop=["e", "zq"])))
        assert "".join(pieces) == output.outputs[0].text
        outputs = [output]
    elif kind == 2:
        outputs = llm.chat([{"role": "user", "content": f"hello {seed}"}], sampled(seed, length))
    else:
        outputs = []
        with OpenBatch(llm) as batch:
            for place in range(3):
                batch.add(prompt, sampled(seed + place, length), tag=place)
            while batch:
                outputs += batch.step()
        outputs = [output for _, output in sorted(outputs, key=lambda taken: taken[0])]
    return [one.token_ids for output in outputs for one in output.outputs]


def start(work):
    """Run work() in a thread.  -> a future"""
    return ThreadPoolExecutor(1).submit(work)


def check_idle(llm):
    """Nothing of any call is left."""
    assert not llm.engine.scheduler.has_unfinished
    assert not llm.session._calls
    assert not llm.session.line._places
    llm.engine.check()
    assert llm.engine.num_free_pages == llm.engine.scheduler.num_pages


def wait_for_others(llm, count):
    """Until so many calls are in line."""
    limit = time.monotonic() + 20
    while len(llm.session.line._places) < count:
        assert time.monotonic() < limit, "nobody came"
        time.sleep(0.001)


@pytest.fixture
def brief_turns():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_eight_threads_get_the_tokens_that_each_gets_alone(shared, brief_turns):
    alone = [ask(shared, seed) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: ask(shared, seed), range(24)))
    assert together == alone
    check_idle(shared)


def test_asyncio_threads_get_the_tokens_that_each_gets_alone(shared):
    params = [sampled(seed, 20) for seed in range(10)]
    alone = [shared.generate("a prompt", one)[0].outputs[0].token_ids for one in params]

    async def gather():
        return await asyncio.gather(*(asyncio.to_thread(shared.generate, "a prompt", one) for one in params))

    assert [outputs[0].outputs[0].token_ids for outputs in asyncio.run(gather())] == alone
    check_idle(shared)


def test_requests_of_two_threads_share_steps(fresh):
    prompts = [[50 + i] for i in range(4)]
    number = itertools.count()
    step, other = fresh.engine.step, None

    def step_when_both_have_come():
        nonlocal other
        if next(number) == 2:
            other = start(lambda: fresh.generate(prompts, sampled(1, 60)))
            wait_for_others(fresh, 2)
        return step()

    fresh.engine.step = step_when_both_have_come
    record = record_steps(fresh.session, prompts, sampled(1, 60))
    assert max(advanced for *_, advanced in record.notes) == 8
    tokens = [fresh.session.output(submission).outputs[0].token_ids for submission in record.submissions]
    assert tokens == [output.outputs[0].token_ids for output in other.result(20)]
    assert fresh.engine.metrics.num_decode_passes < 70, "59 for each call alone"
    check_idle(fresh)


def test_a_stream_does_not_run_past_its_stop_string_while_another_thread_steps(fresh, monkeypatch):
    """Its text is asked for while the driver is half-way through giving it the token that ends it."""
    free = fresh.generate("hello", sampled(4, 80))[0].outputs[0]
    params = sampled(4, 80, stop=[free.text[40:42]])
    expected = fresh.generate("hello", params)[0].outputs[0]
    append, half_way, asked = Request.append, threading.Event(), threading.Event()

    def append_and_wait(request, token):
        if request.params == params and len(request.output_token_ids) == len(expected.token_ids) - 1:
            request.output_token_ids.append(token)
            half_way.set()
            asked.wait(20)
            request.output_token_ids.pop()
        return append(request, token)

    monkeypatch.setattr(Request, "append", append_and_wait)
    stream = fresh.stream("hello", params)
    pieces = [next(stream)]
    driver = start(lambda: fresh.generate("other", sampled(5, 100)))
    assert half_way.wait(20)
    pieces.append(next(stream))
    asked.set()
    rest, output = collect(stream)
    assert "".join(pieces + rest) == output.outputs[0].text == expected.text
    driver.result(20)


def test_a_bad_request_is_refused_in_its_own_thread(fresh):
    expected = fresh.generate("good", sampled(1, 100))[0].outputs[0].token_ids
    small = LLM(fresh, num_gpu_blocks_override=4)
    for llm, prompt, words in ((fresh, [], "is empty"), (small, [7] * 200, "the cache holds 4")):
        driver = start(lambda llm=llm: llm.generate("good", sampled(1, 100)))
        wait_for_others(llm, 1)
        for _ in range(5):
            with pytest.raises(ValueError, match=words):
                llm.generate([[7], prompt], sampled(1, None))
            with pytest.raises(ValueError, match=words):
                next(llm.stream(prompt, sampled(1, None)))
        assert driver.result(20)[0].outputs[0].token_ids == expected
        check_idle(llm)


def test_an_abandoned_stream_leaves_others_alone(fresh):
    """It gets its text while another thread drives, and is given up after the first piece."""
    expected = fresh.generate("good", sampled(1, 200))[0].outputs[0].token_ids
    driver = start(lambda: fresh.generate("good", sampled(1, 200)))
    wait_for_others(fresh, 1)
    for seed in range(4):
        stream = fresh.stream("given up", sampled(seed, 200))
        assert next(stream)
        stream.close()
    assert not driver.done()
    assert driver.result(20)[0].outputs[0].token_ids == expected
    check_idle(fresh)


def test_a_stream_that_is_collected_in_a_step_is_cancelled_after_it(fresh, monkeypatch):
    """The collector may run anywhere, also where the driver changes its lists."""
    streams = [fresh.stream("given up", sampled(seed, 200)) for seed in range(2)]
    for stream in streams:
        next(stream)
    schedule, sizes = fresh.engine.scheduler.schedule, []

    def schedule_and_collect(*given):
        scheduled = schedule(*given)
        sizes.append(len(fresh.engine.scheduler.active))
        streams.clear()
        gc.collect()
        sizes.append(len(fresh.engine.scheduler.active))
        return scheduled

    monkeypatch.setattr(fresh.engine.scheduler, "schedule", schedule_and_collect)
    del stream
    fresh.generate("good", sampled(1, 4))
    assert sizes[:4] == [3, 3, 1, 1]
    check_idle(fresh)


def test_a_driver_that_fails_or_is_interrupted_leaves_the_others_going(fresh, monkeypatch):
    prompts = [[60 + i] for i in range(3)]
    expected = [fresh.generate([prompt], sampled(3, 90))[0].outputs[0].token_ids for prompt in prompts]
    step, main = fresh.engine.step, threading.get_ident()
    for error in (KeyboardInterrupt, MemoryError):
        others, count = [], itertools.count()

        def failing(error=error, others=others, count=count):
            if threading.get_ident() == main and not others:
                others += [start(lambda prompt=prompt: fresh.generate([prompt], sampled(3, 90))) for prompt in prompts]
                wait_for_others(fresh, 4)
            if threading.get_ident() == main and next(count) == 8:
                raise error
            return step()

        monkeypatch.setattr(fresh.engine, "step", failing)
        with pytest.raises(error):
            fresh.generate(["long"] * 5, sampled(1, 200))
        assert [other.result(20)[0].outputs[0].token_ids for other in others] == expected
        check_idle(fresh)


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also in a process that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_call_that_waits_and_no_other(fresh, interruptible):
    """A real SIGINT, while another thread drives: the main thread's call ends at once, the driver's goes on."""
    expected = fresh.generate("good", sampled(1, 200))[0].outputs[0].token_ids
    step, waiting = fresh.engine.step, threading.Event()

    def slow():
        waiting.wait(20)
        time.sleep(0.01)
        return step()

    fresh.engine.step = slow
    driver = start(lambda: fresh.generate("good", sampled(1, 200)))
    wait_for_others(fresh, 1)

    def interrupt():
        wait_for_others(fresh, 2)
        waiting.set()
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fresh.generate(["mine"] * 3, sampled(2, 240))
    assert not driver.done()
    fresh.engine.step = step
    interrupter.result(20)
    assert driver.result(20)[0].outputs[0].token_ids == expected
    check_idle(fresh)


def test_a_call_is_told_of_outputs_that_ended_in_the_drivers_broken_step(fresh, monkeypatch):
    """The step gave another call its last token, and was interrupted before it could say so."""
    step, main, others = fresh.engine.step, threading.get_ident(), []

    def broken():
        if threading.get_ident() != main:
            return step()
        if not others:
            others.append(start(lambda: fresh.generate("short", sampled(1, 3))))
            wait_for_others(fresh, 2)
        advanced = step()
        if any(request.finished for request in advanced):
            raise KeyboardInterrupt
        return advanced

    monkeypatch.setattr(fresh.engine, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        fresh.generate("long", sampled(2, 200))
    assert len(others[0].result(20)[0].outputs[0].token_ids) == 3
    check_idle(fresh)


def test_every_request_without_a_seed_has_a_number_of_its_own(fresh, brief_turns):
    with ThreadPoolExecutor(8) as pool:
        many = pool.map(lambda _: fresh.generate([[7]] * 20, SamplingParams(max_tokens=1)), range(16))
    numbers = [output.request_id for outputs in many for output in outputs]
    assert len(set(numbers)) == 320


def test_metrics_and_the_prefix_cache_may_be_asked_for_by_any_thread(fresh):
    assert fresh.reset_prefix_cache()
    driver = start(lambda: [fresh.generate([[9] * 150], sampled(1, 60)) for _ in range(5)])
    asked = 0
    while not driver.done():
        assert {metric.name for metric in fresh.get_metrics()} >= {"vllm:num_requests_running"}
        assert fresh.get_stats()["num_requests_finished"] <= 5
        fresh.reset_prefix_cache()
        asked += 1
        time.sleep(0.001)
    first, *rest = driver.result()
    assert asked > 5
    assert all(outputs[0].outputs[0].token_ids == first[0].outputs[0].token_ids for outputs in rest)
    assert fresh.reset_prefix_cache()
    check_idle(fresh)


def test_the_cache_is_not_forgotten_while_another_thread_drives(fresh):
    answers, step = [], fresh.engine.step
    fresh.engine.step = lambda: answers.append(start(fresh.reset_prefix_cache).result(20)) or step()
    fresh.generate("x", sampled(1, 3))
    assert answers == [False] * 3
    assert fresh.reset_prefix_cache()


def test_no_thread_is_made_and_the_llm_is_freed(llm):
    one = LLM(llm)
    before = threading.active_count()
    stream = one.stream("x", sampled(1, 20))
    next(stream)
    one.generate("x", sampled(1, 20))
    assert threading.active_count() == before
    gone = weakref.ref(one.engine)
    del one
    stream.close()
    del stream
    gc.collect()
    assert gone() is None


def test_the_interpreter_exits_when_the_calls_of_its_threads_have_ended(target_folder):
    """And without closing a stream that is open."""
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from headstart import LLM, SamplingParams\n"
        f"llm = LLM({str(target_folder)!r}, dtype='float32', device='cpu')\n"
        "params = SamplingParams(max_tokens=50, ignore_eos=True)\n"
        "stream = llm.stream('y', params)\n"
        "next(stream)\n"
        "for _ in range(4):\n"
        "    ThreadPoolExecutor(1).submit(lambda: llm.generate('x', params) and print(end='made '))\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made " * 4, "")


def test_random_calls_and_cancels_of_many_threads(shared, brief_turns):
    """For some seconds: calls of all kinds, streams given up half-way, batches left early; every output is the one it is alone."""
    expected = [ask(shared, seed) for seed in range(16)]
    limit, counts = time.monotonic() + 3, [0] * 6

    def work(place):
        generator = random.Random(place)
        while time.monotonic() < limit or not counts[place]:  # at least one whole answer each, on a slow machine too
            seed = generator.randrange(16)
            kind = generator.random()
            if kind < 0.2:
                stream = shared.stream("given up", sampled(seed, 100))
                for _ in range(generator.randrange(1, 6)):
                    next(stream, None)
                stream.close()
            elif kind < 0.4:
                with OpenBatch(shared) as batch:
                    for i in range(generator.randrange(1, 4)):
                        batch.add("left", sampled(seed + i, 60))
                    for _ in range(generator.randrange(4)):
                        batch.step()
            else:
                assert ask(shared, seed) == expected[seed]
                counts[place] += 1
            time.sleep(generator.choice([0, 0, 0.01]))

    for future in [start(lambda place=place: work(place)) for place in range(6)]:
        future.result(60)
    assert min(counts) > 0
    check_idle(shared)
