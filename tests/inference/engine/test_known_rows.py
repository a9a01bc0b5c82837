"""Known tokens beside running requests, in one pass: the bits of two passes, on a GPU and in the interpreter."""

import copy

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.inference.engine import step as step_module
from headstart.inference.engine.graphs import StepGraphs
from headstart.inference.engine.prompt_passes import KnownRows
from headstart.inference.engine.request import Status
from headstart.inference.engine.scheduler import Chunk
from headstart.inference.models import canary


def changed_by(work, engine):
    """What `work` returns and leaves in caches and seats, which are then put back."""
    state = [engine.cache.kv, engine.seats.integers, engine.seats.feature, engine.seats.history]
    state += [engine.drafter.kv] if engine.drafter.kv_shape else []
    before = [x.clone() for x in state]
    found = work()
    after = [x.clone() for x in state]
    for x, old in zip(state, before):
        x.copy_(old)
    return found, after


@pytest.mark.parametrize(
    ("device", "drafts", "early"),
    [
        pytest.param("cuda", 0, False, marks=pytest.mark.gpu),
        pytest.param("cuda", 0, True, marks=pytest.mark.gpu),
        pytest.param("cuda", 3, False, marks=pytest.mark.gpu),
        pytest.param("cuda", "eagle3", True, marks=pytest.mark.gpu),
        pytest.param("cpu", 1, False, marks=pytest.mark.interpreter),
        pytest.param("cpu", 0, True, marks=pytest.mark.interpreter),
        pytest.param("cpu", "eagle3", True, marks=pytest.mark.interpreter),
    ],
)
def test_a_pass_with_known_rows_has_the_bits_of_two_passes(random_target, device, drafts, early, monkeypatch):
    """early: beside requests, known tokens stop before the last layer's MLP, but for the last of each chunk."""
    if device == "cpu":  # the interpreter takes 10 s for it
        monkeypatch.setattr(canary, "find_fault", lambda decoder: None)
    target = copy.deepcopy(random_target).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    monkeypatch.setattr(step_module, "EARLY_FROM", 12)
    if drafts == "eagle3":  # which reads what enters layers, of all known tokens
        head = Eagle3(Eagle3Config.for_target(target.config, aux_layer_ids=(0, 1))).to(device, target.dtype)
        head.take_embedding(target.model.embed_tokens.weight)
        speculative = {"model": head, "num_speculative_tokens": 2}
    else:
        speculative = {"model": target, "num_speculative_tokens": drafts} if drafts else None
    llm = LLM(target, max_num_seqs=3, enforce_eager=True, enable_prefix_caching=False, speculative_config=speculative)
    engine, step = llm.engine, llm.engine.graphs.step
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    prompts = [list(range(1, 67 if device == "cuda" else 9)), [5, 4, 3], list(range(2, 10))]
    requests = [llm.session.submit(prompt, params).requests[0] for prompt in prompts]
    while not all(request.status is Status.RUNNING for request in requests):
        engine.step()
    engine.read_steps()
    third = requests[2]  # its prompt is computed once more, in two chunks of one pass
    chunks = [Chunk(third, 0, 5, False), Chunk(third, 5, 3, True)]
    known, count = KnownRows(12, engine.seats, engine.drafter), 8
    graphs = StepGraphs([step], 3, captured=False)
    graphs._known = {(0, 0): [known]}
    engine.prompts.graphs = graphs
    assert engine.prompts.place(chunks) is known
    seats = engine.seats.on_device([request.seat for request in requests[:2]])

    def apart():
        output = step(seats)
        return output.emitted, output.logits, *given(step.compute(known))

    def together():
        step.unfinished = engine.decoder.new_unfinished(12) if early else None
        output = step(seats, known=known)
        found = output.emitted, output.logits, *given(output.known)
        step.unfinished = None
        return found

    def given(known):
        """All hidden states, then what the chunks' last tokens leave."""
        assert (known.unfinished is not None) == (step.unfinished is not None)
        last = known.last(*(torch.tensor(x, device=device) for x in ([4, 7], [0, 1])))
        return known.of(engine.decoder, 0, count), *last

    (found, after), (expected, after_both) = changed_by(together, engine), changed_by(apart, engine)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    own = slice(64 * engine.cache.num_kv_heads, None)  # page 0 is the padding's
    for a, b in zip(after[:1] + after[4:], after_both[:1] + after_both[4:]):
        assert torch.equal(a[:, :, own], b[:, :, own])
        assert a.isfinite().all()
    for a, b in zip(after[1:4], after_both[1:4]):
        assert torch.equal(a, b)
