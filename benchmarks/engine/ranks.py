"""`headstart bench ranks`: the same random model on one rank and on several, in one run: steps, first tokens, tokens per second.

Plain decoding through the session that LLM.generate drives, in the steady state. With a head also steps that draft a chain, once
with the head's own lm_heads whole on each rank and once divided; its weights are random, so hardly a token is accepted. *of one* is
the time of a step over that of the first size on the same requests. The floor is that of one rank's own weights, keys and
values; what ranks hand to each other is left out of it, so the distance to it shows what that costs. Outputs are compared: `same`
says whether all tokens are those of the first size without drafts, which is promised where products are cut alike (docs/engine.md,
Several ranks).
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ...evaluation.results import Report, decimals, plain
from ...evaluation.step_recorder import NoSteadyState, record_steps
from ...evaluation.timing import Times
from ...inference.sampling_params import SamplingParams
from ..floor import StepFloor, copy_bandwidth, product_rate
from ..random_heads import save_random_head
from ..shape import check_fits, config_of_shape, llm_on_ranks
from .startup import FIRST_TOKENS, first_tokens_ms

COLUMNS = {
    "ranks": ("ranks", 5, plain),
    "what": ("what", 22, plain),
    "drafts": ("drafts", 22, lambda drafts: drafts or "none"),
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
    head: str | None = None
    num_speculative_tokens: int = 4


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
    with tempfile.TemporaryDirectory(prefix="headstart-head-") as folder:
        if settings.head:
            depth, where = settings.num_speculative_tokens, dict(dtype=dtype, device=place)
            save_random_head(settings.head, config, depth, Path(folder, "head"), **where)
        bench = RanksBench(settings, config, str(device), dtype, length, rates, Path(folder, "head"), report)
        for size in settings.sizes:
            bench.measure_plain(size)
            for placed in placings(size) if settings.head else ():
                bench.measure_drafts(size, placed)
    return report.finish()


def placings(size):
    """{draft_tensor_parallel_size: how the lm_heads of a head lie} of so many ranks."""
    return {1: "whole", size: "divided"} if size > 1 else {1: "whole"}


class RanksBench:
    """Builds an LLM per size and way of drafting, measures it and writes its lines.  folder: of the head, for all ranks to read"""

    def __init__(self, settings, config, device, dtype, length, rates, folder, report):
        self.settings, self.config, self.device, self.dtype, self.length = settings, config, device, dtype, length
        self.rates, self.folder, self.report = rates, folder, report
        self.first = {}  # (what, whether drafted): the first size's row
        self.tokens = {}  # what: the first size's tokens without drafts

    def measure_plain(self, size):
        with self.llm(size) as llm:
            found = first_tokens(llm, self.settings) | self.steps(llm)
        self.add(size, None, found)

    def measure_drafts(self, size, placed):
        """placed: draft_tensor_parallel_size"""
        depth = self.settings.num_speculative_tokens
        speculative = {"model": str(self.folder), "draft_tensor_parallel_size": placed, "num_speculative_tokens": depth}
        with self.llm(size, speculative_config=speculative) as llm:
            found = self.steps(llm)
        self.add(size, f"{self.settings.head}, {placings(size)[placed]}", found)

    def llm(self, size, **options):
        settings, own = self.settings, dict(dtype=self.dtype, max_model_len=self.length)
        own |= dict(max_num_seqs=max(settings.batches), tensor_parallel_invariant=settings.invariant)
        return llm_on_ranks(self.config, size, self.device, **own, **options)

    def steps(self, llm):
        """{what: (row, token ids)}: steps of each batch; the same prompts for every LLM."""
        settings, dice, found = self.settings, random.Random(1), {}
        params = SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True, seed=1)
        for batch in settings.batches:
            record = record_steps(llm.session, prompts(dice, llm, batch, settings.prompt_tokens), params)
            try:
                tokens, seconds, times = record.steady(batch)
            except NoSteadyState as error:
                self.report.note(f"step of {batch}: left out, {error}")
                continue
            row = Times.of(times).as_dict() | {"floor": None, "over_floor": None, "tokens_per_second": tokens / seconds}
            if llm.tree.num_nodes == 1:  # the floor of drafts, which ranks may divide, is not counted
                context = batch * (settings.prompt_tokens + settings.new_tokens // 2)
                row["floor"] = 1e3 * sum(StepFloor(llm.engine.decoder, *self.rates).of(1, batch, context).values())
                row["over_floor"] = row["p50"] / row["floor"]
            ids = [request.output_token_ids for submission in record.submissions for request in submission.requests]
            found[f"step of {batch}"] = row, ids
        return found

    def add(self, size, drafts, found):
        for what, (row, tokens) in found.items():
            first = self.first.setdefault((what, drafts is not None), row)
            row |= {"of_one": row["p50"] / first["p50"], "same": tokens == self.tokens.setdefault(what, tokens)}
            self.report.add({"ranks": size, "what": what, "drafts": drafts, **row})


def prompts(dice, llm, count, length):
    return [[dice.randrange(llm.engine.decoder.vocab_size) for _ in range(length)] for _ in range(count)]


def first_tokens(llm, settings):
    """{what: (row, token ids)}: the first token of one prompt after a pause; the same prompts for every LLM."""
    dice, found = random.Random(0), {}
    for length in settings.first_prompts:
        given = prompts(dice, llm, FIRST_TOKENS, length)
        times = Times.of(first_tokens_ms(llm, given))
        (output,) = llm.generate([given[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        row = times.as_dict() | {"floor": None, "over_floor": None, "tokens_per_second": None}
        found[f"first token of {length}"] = row, output.outputs[0].token_ids
    return found
