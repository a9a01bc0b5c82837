"""An interrupt at any line of the host's own bookkeeping: nothing is lost, and the LLM goes on.

A trace function raises KeyboardInterrupt where a line begins, which is more often than Python itself does.
"""

import linecache
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

import headstart.inference
from headstart import LLM, SamplingParams
from headstart.inference.line import Call

pytestmark = pytest.mark.usefixtures("thawed_heap")

ROOT = Path(headstart.inference.__path__[0])
FILES = {
    str(path) for path in (*ROOT.glob("engine/*.py"), *(ROOT / f"{name}.py" for name in ("llm", "session", "line")))
}
SHARED = [(7 * i) % 250 for i in range(64)]  # one page, which all prompts begin with
PROMPTS = [SHARED + [(11 * i + k) % 250 for i in range(57 - 2 * k)] for k in range(2)]
OTHER = SHARED + [(13 * i) % 250 for i in range(54)]
PARAMS = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1, top_k=40),
    SamplingParams(
        temperature=0.9,
        seed=4,
        max_tokens=6,
        ignore_eos=True,
        stop=["no such text"],
        presence_penalty=0.5,
        logit_bias={5: 1.5},
        bad_words=["ab"],
        min_tokens=3,
    ),
]
OTHERS = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, logprobs=1)


# Lines between two moves of a request, a page or a token: a step that broke off there lost something once.
MOVES = {
    "request.seat = heapq.heappop(self.free_seats)",
    "self.active.append(request)",
    "self.waiting.appendleft(request)",
    "self.active.remove(request)",
    "kept = len(request.output_token_ids) - before",
    "request.committed += kept",
}


class Injector:
    """Counts the lines of FILES that the block executes, and raises KeyboardInterrupt at the n-th time of one of them."""

    def __init__(self, place=None, time=1):
        self.place, self.time, self.counts = place, time, Counter()

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, _):
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame, event, _):
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.counts[place] += 1
            if place == self.place and self.counts[place] == self.time:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def make(target_folder, head_folder):
    return LLM(
        str(target_folder),
        dtype="float32",
        device="cpu",
        max_num_seqs=3,
        num_gpu_blocks_override=5,
        max_num_batched_tokens=192,
        max_model_len=200,
        speculative_config={"model": str(head_folder)},
    )


def result(outputs):
    return [
        (o.prompt_logprobs, [(one.token_ids, one.logprobs, one.finish_reason) for one in o.outputs]) for o in outputs
    ]


def interrupted(llm, place, time, expected):
    """Interrupt a call beside another one.  -> whether it was"""
    session, engine, call = llm.session, llm.engine, Call()
    before = llm.get_stats()
    assert llm.reset_prefix_cache()
    other = session.submit({"prompt_token_ids": OTHER}, OTHERS, call)
    session.step()
    hit = False
    try:
        with Injector(place, time) as injector:
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS)
    except KeyboardInterrupt:
        hit = True
    else:
        assert result(outputs) == expected[0]
        if place is None:
            session.drive(call, lambda _: call.ended)
            return injector.counts
    engine.check()
    again = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS)
    assert result(again) == expected[0]
    session.drive(call, lambda _: call.ended)
    assert result([session.output(other)]) == expected[1]
    assert not engine.scheduler.has_unfinished
    assert not session._calls
    assert engine.num_free_pages == engine.scheduler.num_pages
    engine.check()
    after = llm.get_stats()
    for name in before:
        if name.startswith("num_") or name.endswith("seconds"):
            assert after[name] >= before[name], name
    return hit


def test_an_interrupt_at_any_line_loses_nothing(target_folder, head_folder):
    """At a sample of the lines, where they are executed first or a later time."""
    plain, llm = LLM(str(target_folder), dtype="float32", device="cpu"), make(target_folder, head_folder)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = (
        result(plain.generate(prompts, PARAMS)),
        result(plain.generate([{"prompt_token_ids": OTHER}], OTHERS)),
    )
    counts = interrupted(llm, None, 1, expected)
    assert llm.get_stats()["num_preemptions"] > 0
    assert llm.get_stats()["prefix_cache_hits"] > 0
    generator, hits = random.Random(0), 0
    # Python looks for signals where a function begins, after a call and where a loop turns back: never while a place is left.
    places = [place for place in sorted(counts) if "places" not in linecache.getline(*place)]
    always = [place for place in places if linecache.getline(*place).strip() in MOVES]
    for place in sorted({*always, *generator.sample(places, 24)}):
        hits += interrupted(llm, place, generator.choice((1, generator.randint(1, counts[place]))), expected)
    assert hits > 25
