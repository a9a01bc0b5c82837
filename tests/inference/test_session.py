"""Session: the order in which prompts that were given together start; pauses. (Threads, streams, interrupts: the files beside.)"""

import gc
import weakref

from headstart import LLM, SamplingParams
from headstart.inference.line import Call


def test_of_prompts_given_together_the_longest_outputs_start_first_with_the_seeds_of_their_places(target_folder):
    lengths = [3, 12, 1, 12, 7]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = ["a", "b", "c", "d", "e"]
    together = LLM(str(target_folder), dtype="float32", seed=3, max_num_seqs=1)
    outputs = together.generate(prompts, params)
    started = sorted(range(5), key=lambda i: outputs[i].metrics.scheduled_ts)
    assert started == [1, 3, 4, 0, 2]  # of equal lengths, as they were given
    one_by_one = LLM(str(target_folder), dtype="float32", seed=3, max_num_seqs=1)
    for prompt, param, output in zip(prompts, params, outputs):
        (alone,) = one_by_one.generate([prompt], param)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.request_id == output.request_id


def test_prompts_without_a_limit_start_before_those_with_one(target_folder):
    llm = LLM(str(target_folder), dtype="float32", max_num_seqs=1, max_model_len=40)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, None, 30)]
    outputs = llm.generate([[5] * 20, [6] * 20, [7] * 5], params)
    assert sorted(range(3), key=lambda i: outputs[i].metrics.scheduled_ts) == [1, 2, 0]


def test_no_collection_walks_what_was_there_before_a_call_and_all_is_collected_after_it(target_folder):
    llm, seen = LLM(str(target_folder), dtype="float32"), []

    class Cycle:  # only a collection frees one
        def __init__(self):
            self.itself = self

    old = Cycle()
    freed = weakref.ref(old)
    del old

    def note(_):
        gc.collect()
        seen.append(freed() is not None)
        return seen[2:]

    call = Call()
    llm.session.submit("a", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), call)
    llm.session.drive(call, note)
    llm.session.leave(call)
    assert seen == [True] * 3
    gc.collect()
    assert freed() is None
    assert gc.get_freeze_count() == 0


def test_a_heap_that_the_program_froze_stays_frozen(target_folder):
    llm = LLM(str(target_folder), dtype="float32")
    gc.freeze()
    try:
        llm.generate(["a"], SamplingParams(temperature=0.0, max_tokens=2))
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
