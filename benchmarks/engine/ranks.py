"""`headstart bench ranks`: the same random model on one rank and on several, in one run: steps, first tokens, tokens per second.

Plain decoding through the session that LLM.generate drives, in the steady state. *of one* is the time of a step over that of the
first size on the same requests. The floor is that of one rank's own weights, keys and values; what ranks hand to each other is left
out of it, so the distance to it shows what that costs. Outputs are compared: `same` says whether all tokens are those of the first
size, which is promised where products are cut alike (docs/engine.md, Several ranks).
"""

import random
import warnings
from dataclasses import dataclass

import torch

from ...evaluation.results import Report, decimals, plain
from ...evaluation.step_recorder import record_steps
from ...evaluation.timing import Times, release
from ...inference.llm import LLM
from ...inference.sampling_params import SamplingParams
from ..floor import StepFloor, copy_bandwidth, product_rate
from ..shape import check_fits, config_of_shape
from .startup import FIRST_TOKENS, first_tokens_ms

COLUMNS = {
    "ranks": ("ranks", 5, plain),
    "what": ("what", 22, plain),
    "p20": ("p20 ms", 8, decimals(3)),
    "p50": ("p50 ms", 8, decimals(3)),
    "p80": ("p80 ms", 8, decimals(3)),
    "of_one": ("of one", 6, decimals(2)),
    "floor": ("floor ms", 8, decimals(3)),
    "over_floor": ("x floor", 7, decimals(2)),
    "tokens_per_second": ("tokens/s", 8, decimals(0)),
    "same": ("same", 4, lambda same: "yes" if same else "no"),
}


@dataclass(frozen=True)
class RanksSettings:
    """Settings of `bench ranks`; see `headstart bench ranks --help`."""

    shape: str
    sizes: tuple[int, ...] = (1, 2)
    invariant: int | None = None
    batches: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 1000
    new_tokens: int = 128
    first_prompts: tuple[int, ...] = (1000, 2048)


def bench_ranks(settings, device, dtype, command, output=None, commit=None):
    """Measure every size of `settings`. Prints the table, then the JSON object, which is returned."""
    config = config_of_shape(settings.shape)
    length = max(settings.prompt_tokens + settings.new_tokens, *settings.first_prompts) + 1
    if length > config.max_position_embeddings:
        raise ValueError(f"{length} tokens are beyond the shape's {config.max_position_embeddings}")
    if 1 in settings.sizes:
        check_fits(settings.shape, device, dtype)
    report = Report("ranks", COLUMNS, device, command, vars(settings), output, commit)
    place = torch.device(device)
    rates = copy_bandwidth(place), product_rate(place, dtype, lasting=True)
    report.state(
        f"copy {rates[0] / 1e12:.3f} TB/s (bytes read and written), products {rates[1] / 1e12:.1f} TFLOP/s over time",
        copy_bytes_per_second=round(rates[0]),
        products_per_second=round(rates[1]),
    )
    first = None
    for size in settings.sizes:
        release(place)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "with tensor_parallel_size")
            llm = LLM(
                config,
                load_format="dummy",
                dtype=dtype,
                device=device,
                max_model_len=length,
                max_num_seqs=max(settings.batches),
                enable_prefix_caching=False,
                tensor_parallel_size=size,
                tensor_parallel_invariant=settings.invariant,
            )
        try:
            found = measure(llm, settings, rates)
        finally:
            if llm.session.ranks is not None:
                llm.session.ranks.end()
            del llm
        first = first or found
        for what, (row, tokens) in found.items():
            of_one = row["p50"] / first[what][0]["p50"]
            report.add({"ranks": size, "what": what, **row, "of_one": of_one, "same": tokens == first[what][1]})
    return report.finish()


def measure(llm, settings, rates):
    """{what: (row, token ids)} of one LLM; the same prompts for every one."""
    dice, vocab = random.Random(0), llm.engine.decoder.vocab_size
    floor, found = StepFloor(llm.engine.decoder, *rates), {}

    def prompts(count, length):
        return [[dice.randrange(vocab) for _ in range(length)] for _ in range(count)]

    for length in settings.first_prompts:
        given = prompts(FIRST_TOKENS, length)
        times = Times.of(first_tokens_ms(llm, given))
        (output,) = llm.generate([given[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        row = times.as_dict() | {"floor": None, "over_floor": None, "tokens_per_second": None}
        found[f"first token of {length}"] = row, output.outputs[0].token_ids
    params = SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True, seed=1)
    for batch in settings.batches:
        record = record_steps(llm.session, prompts(batch, settings.prompt_tokens), params)
        tokens, seconds, steps = record.steady(batch)
        context = batch * (settings.prompt_tokens + settings.new_tokens // 2)
        least = 1e3 * sum(floor.of(1, batch, context).values())
        row = Times.of(steps).as_dict() | {"floor": least, "tokens_per_second": tokens / seconds}
        row["over_floor"] = row["p50"] / least
        ids = [request.output_token_ids for submission in record.submissions for request in submission.requests]
        found[f"step of {batch}"] = row, ids
    return found
