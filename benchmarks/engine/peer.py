"""`headstart bench peer`: the same random model decoded by transformers' generate and by this engine, in one run.

generate runs as its documentation advises for speed: with a static cache, which makes it compile the forward pass into CUDA graphs
on a GPU. Both decode the same prompts greedily and share one copy of the weights. Times are between tokens, without prompt and
compilation. The number of agreeing tokens is printed for information: the two sum in different orders, so near-ties can differ.
"""

import itertools
import random
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from ...evaluation.results import Report, decimals, plain
from ...evaluation.step_recorder import record_steps
from ...evaluation.timing import Times, release
from ...inference.llm import LLM
from ...inference.sampling_params import SamplingParams
from ..shape import check_fits, config_of_shape

COLUMNS = {
    "engine": ("engine", 24, plain),
    "batch": ("batch", 5, plain),
    "p20": ("p20 ms", 8, decimals(3)),
    "p50": ("p50 ms", 8, decimals(3)),
    "p80": ("p80 ms", 8, decimals(3)),
    "tokens_per_second": ("tokens/s", 8, decimals(0)),
    "start": ("start s", 7, decimals(1)),
    "speedup": ("faster", 6, lambda value: f"{value:.2f}x"),
    "agreeing": ("agreeing", 8, decimals(1)),
}


@dataclass(frozen=True)
class PeerSettings:
    """Settings of `bench peer`; see `headstart bench peer --help`."""

    shape: str
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 1000
    new_tokens: int = 64


class TokenClock(StoppingCriteria):
    """A stopping criterion that records the time of every token and never stops."""

    def __init__(self):
        self.marks = []

    def __call__(self, input_ids, scores, **_):
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def bench_peer(settings, device, dtype, command, output=None, commit=None):
    """Measure every line of `settings`. Prints the table, then the JSON object, which is returned."""
    config = config_of_shape(settings.shape)
    length = settings.prompt_tokens + settings.new_tokens
    if settings.new_tokens < 16 or length > config.max_position_embeddings:
        raise ValueError(
            f"--new-tokens must be at least 16, and with --prompt-tokens at most {config.max_position_embeddings} tokens, got "
            f"{settings.prompt_tokens} + {settings.new_tokens}"
        )
    check_fits(settings.shape, device, dtype)
    report = Report("peer", COLUMNS, device, command, vars(settings), output, commit)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    dice = random.Random(0)
    llm = None
    for batch in settings.batches:
        prompts = [[dice.randrange(config.vocab_size) for _ in range(settings.prompt_tokens)] for _ in range(batch)]
        theirs, their_times, seconds = run_generate(module, prompts, settings.new_tokens)
        peer = _row("transformers, static", batch, their_times, seconds)
        report.add(peer)
        torch._dynamo.reset()  # its graphs hold their own cache
        release(torch.device(device))
        start = time.perf_counter()
        llm = llm or LLM(module, max_model_len=length, max_num_seqs=max(settings.batches))
        ours, our_times, seconds = run_llm(llm, prompts, settings.new_tokens, start)
        equal = [
            sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
            for a, b in zip(ours, theirs)
        ]
        row = _row("headstart", batch, our_times, seconds)
        row |= {"speedup": their_times.p50 / our_times.p50, "agreeing": sum(equal) / batch}
        report.add(row)
    return report.finish()


def _row(engine, batch, times, start):
    rate = batch / times.p50 * 1e3
    return {"engine": engine, "batch": batch, **times.as_dict(), "tokens_per_second": rate, "start": start}


def run_generate(module, prompts, new_tokens):
    """Run transformers' generate once to compile and once to measure.  -> (outputs, Times of a token, seconds until compiled)"""
    ids = torch.tensor(prompts, device=module.device)
    arguments = dict(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
    )
    start = time.perf_counter()
    with torch.no_grad():
        module.generate(ids, **arguments)
        compiled = time.perf_counter() - start
        clock = TokenClock()
        output = module.generate(ids, stopping_criteria=StoppingCriteriaList([clock]), **arguments)
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(clock.marks[2:])]
    return output[:, ids.shape[1] :].tolist(), Times.of(gaps), compiled


def run_llm(llm, prompts, new_tokens, start):
    """Decode the prompts with Headstart, measured as transformers is.  -> (outputs, Times of a token, seconds until warm)"""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
    llm.generate([prompt[::-1] for prompt in prompts], params)
    warm = time.perf_counter() - start
    record = record_steps(llm.session, prompts, params)
    *_, steps = record.steady(len(prompts))
    outputs = [llm.session.output(submission) for submission in record.submissions]
    return [output.outputs[0].token_ids for output in outputs], Times.of(steps), warm
