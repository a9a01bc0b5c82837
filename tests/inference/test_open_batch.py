"""Requests added while others run: their outputs, and the engine's state after their owner leaves."""

import pytest

from headstart.inference.llm import LLM
from headstart.inference.open_batch import OpenBatch
from headstart.inference.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_target):
    return LLM(tiny_target, device="cpu", dtype="float32", max_num_seqs=3)


def params(seed, length):
    return SamplingParams(temperature=1.0, max_tokens=length, seed=seed, ignore_eos=True)


def test_requests_that_come_while_others_run_give_what_each_gives_alone(llm):
    prompts = [[5 + i, 9, 40 + i] for i in range(6)]
    lengths = [9, 3, 14, 6, 2, 11]
    alone = [llm.generate([p], params(i, n))[0].outputs[0] for i, (p, n) in enumerate(zip(prompts, lengths))]
    found, waiting = {}, list(range(6))
    with OpenBatch(llm) as batch:
        while waiting or batch:
            if waiting and len(batch) < 4:  # one more than run at once
                place = waiting.pop(0)
                batch.add(prompts[place], params(place, lengths[place]), tag=place)
            for tag, output in batch.step():
                assert tag not in found
                found[tag] = output.outputs[0]
    assert [found[place].token_ids for place in range(6)] == [one.token_ids for one in alone]
    assert [found[place].finish_reason for place in range(6)] == ["length"] * 6


def test_leaving_cancels_what_has_not_ended(llm):
    with OpenBatch(llm) as batch:
        for place in range(5):
            batch.add([7, place], params(place, 50))
        batch.step()
        assert len(batch) == 5
    assert len(batch) == 0
    assert not llm.engine.scheduler.has_unfinished
    assert len(llm.generate([[7, 8]], params(0, 5))[0].outputs[0].token_ids) == 5


def test_requests_that_end_in_steps_of_others_are_handed_out_too(llm):
    with OpenBatch(llm) as batch:
        batch.add([5, 9], params(1, 4), tag="short")
        batch.add([5, 9], params(2, 30), tag="long")
        pieces = llm.stream([7, 8], params(0, 9))
        while next(pieces, None) is not None:
            pass
        for name, length in (("short", 4), ("long", 30)):
            ((tag, output),) = batch.step()
            assert (tag, len(output.outputs[0].token_ids)) == (name, length)
            llm.generate([[7, 8]], params(0, 40))  # until the others have ended, too
        assert not batch


def test_what_generate_refuses_is_refused(llm):
    with OpenBatch(llm) as batch:
        with pytest.raises(ValueError, match="one output per prompt, got n=2"):
            batch.add([7], SamplingParams(n=2))
        with pytest.raises(ValueError, match="is empty"):
            batch.add([], SamplingParams())
        assert len(batch) == 0
