"""`headstart verify-lossless`: check on a model that speculation does not change its output.

There are two kinds of evidence. *Bits*: tokens and log-probabilities of every prompt equal those of plain decoding one request at a
time. The verifier `strict` promises that at every temperature, every verifier at temperature 0. *Distribution*: many short samples
of one prompt with and without speculation, with different seeds, are compared by a two-sample G-test. Every verifier promises that
they agree. A control makes the same test between two temperatures of plain decoding: if it sees no difference, the test could not
have failed.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from ..inference.llm import LLM
from ..inference.sampling_params import SamplingParams

LEAST_EXPECTED = 5  # per side and outcome: with fewer the G-test's statistic is not chi-square distributed
ALPHA = 1e-4  # a lossless engine fails the test of the distribution once in 1 / ALPHA runs
SAMPLED_TOKENS = 8  # tokens per sample: the first comes from the prompt, the others through the verifier
CONTROL = 0.7  # the control's temperature, as a share of the temperature tested


@dataclass
class Check:
    """One piece of evidence. `passed` is None for a control that saw no difference, which decides nothing."""

    kind: str  # "bits", "distribution" or "control"
    what: str
    found: str
    passed: bool | None

    def line(self):
        verdict = {True: "ok", False: "FAILED", None: "no power"}[self.passed]
        return f"{self.kind:8} {self.what:52} {self.found:58} {verdict}"


def verify_lossless(
    base, speculative, prompts, temperatures=(0.0, 0.8), max_tokens=64, batch=8, samples=500, seed=0, use_tqdm=False
):
    """All checks of one way of speculating.

    base: LLM, whose weights all engines share; speculative: a speculative_config; prompts: as from render_prompt; samples: of the
    first prompt, per side and temperature above 0, for the distribution (0: none).  -> list of Check
    """
    checks, strict = [], speculative.get("verifier", "strict") == "strict"
    longest = max(len(p.get("prompt_token_ids") or base.tokenizer(p["prompt"])["input_ids"]) for p in prompts)
    length = min(
        longest + max(max_tokens, SAMPLED_TOKENS), base.max_model_len
    )  # small caches: four engines share the memory

    def engine(size, speculative=None):
        return LLM(base, max_model_len=length, max_num_seqs=size, speculative_config=speculative)

    alone, crowd = engine(1), engine(batch)
    drafting = {size: engine(size, speculative) for size in dict.fromkeys((1, batch))}
    for temperature in temperatures:
        if not strict and temperature > 0:
            continue
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i, logprobs=1)
            for i in range(len(prompts))
        ]
        plain = alone.generate(prompts, params, use_tqdm=use_tqdm)
        for size, llm in drafting.items():
            outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
            checks.append(compare_bits(plain, outputs, f"T = {temperature:g}, {len(prompts)} prompts, batch {size}"))
    for temperature in temperatures:
        if samples and temperature > 0:
            sides = [(crowd, temperature), (drafting[batch], temperature), (crowd, CONTROL * temperature)]
            with tqdm(
                total=3 * samples, desc="sampling", unit="output", disable=not use_tqdm, dynamic_ncols=True
            ) as bar:
                plain, drafted, other = (
                    draw_samples(llm, prompts[0], heat, samples, seed + number * samples, batch, bar)
                    for number, (llm, heat) in enumerate(sides)
                )
            checks += compare_distributions(plain, drafted, other, temperature)
    return checks


def compare_bits(plain, outputs, what):
    """Tokens and log-probabilities of two lists of RequestOutput.  -> Check"""
    tokens, differing = 0, []
    for number, (one, other) in enumerate(zip(plain, outputs, strict=True)):
        (one,), (other,) = one.outputs, other.outputs
        tokens += len(one.token_ids)
        if one.token_ids != other.token_ids or one.logprobs != other.logprobs:
            pairs = zip(one.token_ids, other.token_ids)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            where = "in a log-probability" if place is None else f"from token {place} on"
            differing.append(f"prompt {number} {where}")
    found = f"{tokens} tokens and their logprobs, "
    found += f"{len(differing)} prompts differ: {differing[0]}" if differing else "none differs"
    return Check("bits", what, found, not differing)


def draw_samples(llm, prompt, temperature, count, seed, batch, bar):
    """Count the first tokens of `count` samples with seeds from `seed` on.  -> Counter of tuples"""
    counts = Counter()
    for start in range(0, count, 16 * batch):
        seeds = range(seed + start, seed + min(start + 16 * batch, count))
        params = [
            SamplingParams(temperature=temperature, max_tokens=SAMPLED_TOKENS, seed=s, ignore_eos=True) for s in seeds
        ]
        outputs = llm.generate([prompt] * len(params), params)
        counts.update(tuple(output.outputs[0].token_ids) for output in outputs)
        bar.update(len(params))
    return counts


def compare_distributions(plain, drafted, other, temperature):
    """The distribution with and without speculation, and the control.  three Counters -> two Checks"""
    chance, cells = two_sample_test(plain, drafted)
    control, _ = two_sample_test(plain, other)
    size = f"{plain.total()} + {drafted.total()} samples of {SAMPLED_TOKENS} tokens"
    return [
        Check(
            "distribution", f"T = {temperature:g}, {size}", f"p = {chance:.3g} over {cells} outcomes", chance >= ALPHA
        ),
        Check(
            "control",
            f"T = {temperature:g} against {CONTROL * temperature:g}, plain decoding",
            f"p = {control:.3g}",
            True if control < ALPHA else None,
        ),
    ]


def two_sample_test(one, other):
    """G-test that two Counters of token sequences have one distribution.  -> (p-value, number of outcomes); 1.0 for one outcome

    Rare sequences are merged: each counts as its longest prefix that is expected often enough on both sides, by the counts of both
    sides together.
    """
    sizes = one.total(), other.total()
    enough = LEAST_EXPECTED * sum(sizes) / min(sizes)
    common = Counter()
    for sequence, count in (one + other).items():
        for length in range(len(sequence) + 1):
            common[sequence[:length]] += count

    def cell(sequence):
        return next(sequence[:n] for n in range(len(sequence), -1, -1) if n == 0 or common[sequence[:n]] >= enough)

    table = {}
    for side, counts in enumerate((one, other)):
        for sequence, count in counts.items():
            table.setdefault(cell(sequence), [0, 0])[side] += count
    # The rest of a common prefix, without its common continuations, may itself be rare: such rests make one outcome.
    cells, rare = [pair for pair in table.values() if sum(pair) >= enough], [0, 0]
    for pair in table.values():
        if sum(pair) < enough:
            rare = [a + b for a, b in zip(rare, pair)]
    if sum(rare):
        cells.append(rare)
    if len(cells) < 2:
        return 1.0, len(cells)
    G = 0.0
    for pair in cells:
        for count, size in zip(pair, sizes):
            if count:
                G += 2 * count * math.log(count * sum(sizes) / (size * sum(pair)))
    half = torch.tensor([(len(cells) - 1) / 2, max(G, 0.0) / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item(), len(cells)


def verdict(checks, verifier):
    """(whether there were checks and all passed, one sentence)."""
    if not checks:
        return False, "nothing was checked: give a temperature of 0, or --samples"
    if not all(check.passed is not False for check in checks):
        return False, "NOT lossless: with the shipped verifiers this is a bug, please report it with the lines above"
    weak = any(check.passed is None for check in checks)
    bits = "the same bits at every temperature tried" if verifier == "strict" else "the same tokens at temperature 0"
    bits = bits if any(check.kind == "bits" for check in checks) else "bits not compared"
    distribution = (
        " and no difference in distribution found" if any(check.kind == "distribution" for check in checks) else ""
    )
    caveat = "; a control saw nothing, so raise --samples to trust the distribution's test" if weak else ""
    return True, f"lossless: {bits}{distribution}{caveat}"


def as_rows(checks):
    """The checks as dicts, for JSON."""
    return [asdict(check) for check in checks]
