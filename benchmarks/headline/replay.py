"""The fifth stage: what the measured acceptances would bring a large model. Its drafts are accepted by chance, its steps are real.

A model of the shape has random weights, and so has what drafts for it, in the size of published heads (random_heads.py) or of a
tenth of the model. The verifier `synthetic` accepts as many drafts a step as were measured on the small target; the rate is the
measured acceptance over the mean time of a step in the steady state, beside plain decoding in the same process. So this is a large
model's speed with a small model's acceptance: other heads on other targets accept more or less. Trees are the static ones of the
fourth stage, for one request; many at once are measured with chains, because 64 trees of 64 nodes take longer than they bring.
"""

import random
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from ...evaluation.compare import hardware_name
from ...evaluation.step_recorder import NoSteadyState, record_steps
from ...evaluation.timing import Times, release
from ...inference.llm import LLM
from ...inference.sampling_params import SamplingParams
from ..random_heads import bytes_with_head, random_head
from ..shape import check_fits, config_of_shape
from .families import DRAFT_MODEL, NGRAM
from .peer_assisted import draft_config, measure_assisted

PLAIN = "plain"


def check_shape(settings, device):
    """ValueError for a shape that there is not, or that does not fit; the trained target's own is not looked at."""
    if settings.shape != "target":
        config_of_shape(settings.shape)
        check_fits(settings.shape, device, dtype_on(device), num_bytes=partial(bytes_with_medusa, settings.depth))


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def bytes_with_medusa(depth, config, dtype):
    """Bytes of a target and of the largest of the heads beside it."""
    return bytes_with_head(config, dtype, "medusa", depth)


class Replay:
    """A model of the shape with random weights, and plain decoding on it."""

    def __init__(self, settings, work, device):
        self.settings, self.work, self.device = settings, work, device
        self.shape = str(work.target) if settings.shape == "target" else settings.shape
        self.config = config_of_shape(self.shape)
        self.config.eos_token_id = None  # outputs are random, and none ends early
        dtype = dtype_on(device)
        check_fits(self.shape, device, dtype, num_bytes=partial(bytes_with_medusa, settings.depth))
        self.length = settings.speed_prompt + settings.speed_tokens
        self.base = LLM(
            self.config,
            load_format="dummy",
            dtype=dtype,
            device=device.type,
            max_model_len=self.length,
            max_num_seqs=1,
            enforce_eager=True,
        )
        self.dice, self.began = random.Random(0), time.perf_counter()
        llm, self.plain = self.engine(None, settings.batch), {}
        for batch in dict.fromkeys((1, settings.batch)):
            self.plain[batch] = self.step(llm, batch)
            print(f"plain, batch {batch}: {self.plain[batch]['tokens_per_second']:.0f} tokens/s", flush=True)

    def engine(self, speculative, seats):
        release(self.device)
        return LLM(
            self.base,
            max_model_len=self.length,
            max_num_seqs=seats,
            speculative_config=speculative,
        )

    def step(self, llm, batch):
        """The figures of the steady state of `batch` requests."""
        vocab = self.config.get_text_config().vocab_size
        # Prompts without common beginnings, so that no page of an earlier one is found in the cache.
        prompts = [[self.dice.randrange(vocab) for _ in range(self.settings.speed_prompt)] for _ in range(batch)]
        params = SamplingParams(max_tokens=self.settings.speed_tokens, ignore_eos=True)
        tokens, seconds, steps = record_steps(llm.session, prompts, params).steady(batch)
        return {
            "tokens_per_step": tokens / len(steps) / batch,
            "tokens_per_second": tokens / seconds,
            "mean": seconds * 1e3 / len(steps),
            **Times.of(steps).as_dict(),
            "steps": len(steps),
        }

    def out_of_time(self):
        return time.perf_counter() - self.began > 60 * self.settings.speed_minutes

    def measure(self, source):
        """Measure one source's steps and keep its rows, unless the time is over before all are measured."""
        found = self.work.needs("acceptance", source.slug)
        ways, rows = {}, []  # a way of drafting: the measured rows on all subjects
        for row in found["rows"]:
            if row["batch"] == self.settings.batch and row["draft"] in ("chain", "static tree"):
                ways.setdefault((row["draft"], row["temperature"]), []).append(row)
        speculative = self.speculation(source)
        for (draft, temperature), measured in ways.items():
            if self.out_of_time():
                print(f"{source.name}: not finished in --speed-minutes {self.settings.speed_minutes:g}", flush=True)
                return
            # A step takes as long whatever it accepts: the draws are of the subjects' mean, and each subject's rate follows.
            asked = fmean(row["acceptance_length"] for row in measured)
            config = speculative | {"verifier": "synthetic", "acceptance_length": asked}
            with tempfile.TemporaryDirectory() as folder:
                config |= {"tree": "chain", "num_speculative_tokens": measured[0]["depth"]}
                if draft != "chain":
                    config["tree"] = str(Path(folder) / "tree.json")
                    Path(config["tree"]).write_text(found["trees"][f"{temperature:g}"])
                batches = dict.fromkeys((1, self.settings.batch) if draft == "chain" else (1,))
                llm = self.engine(config, max(batches))
            for batch in batches:
                rows += self.rows(measured, llm, batch)
            del llm
        figures = {"name": source.name, "rows": rows, "plain": self.plain, "shape": self.settings.shape}
        self.work.keep("speed", source.slug, figures | {"hardware": hardware_name(self.device)})

    def rows(self, measured, llm, batch):
        """A row of the second table for each measured row; none if outputs were too short for a steady state."""
        try:
            step = self.step(llm, batch)
        except NoSteadyState as error:
            print(f"{measured[0]['source']} {measured[0]['draft']}, batch {batch}: left out, {error}", flush=True)
            return []
        found = []
        for one in measured:
            row = {"table": "speed"} | {name: one[name] for name in ("source", "draft", "nodes", "depth")}
            row |= {name: one[name] for name in ("subject", "temperature")} | {"batch": batch}
            row |= step | {"asked": round(one["acceptance_length"], 4), "drawn": step["tokens_per_step"]}
            row["tokens_per_second"] = one["acceptance_length"] * batch * 1e3 / step["mean"]
            row["speedup"] = row["tokens_per_second"] / self.plain[batch]["tokens_per_second"]
            del row["tokens_per_step"]
            print(describe(row), flush=True)
            found.append(row)
        return found

    def speculation(self, source):
        """A speculative_config without tree and verifier."""
        if source == NGRAM:
            return {"method": "ngram"}
        if source == DRAFT_MODEL:
            return {"method": "draft_model", "model": draft_config(self.config)}
        return {"model": random_head(source.trainer, self.config, self.base.engine.decoder, self.settings.depth)}

    def measure_library(self):
        """transformers' assisted generation with the draft model's size and acceptance."""
        found = self.work.needs("acceptance", DRAFT_MODEL.slug)
        release(self.device)
        figures = measure_assisted(self.config, self.settings, self.base.dtype, self.device)
        rows = []
        for measured in found["rows"]:
            if measured["draft"] == "chain" and measured["batch"] == self.settings.batch:
                rate = 1e3 * measured["acceptance_length"] / figures["assisted_ms"]
                row = {"table": "library", "source": "transformers, assisted by a draft model"}
                row |= {name: measured[name] for name in ("subject", "temperature", "depth")}
                row |= {"asked": round(measured["acceptance_length"], 4), "tokens_per_second": rate}
                rows.append(row | {"speedup": rate * figures["plain_ms"] / 1e3})
        print(
            f"transformers: plain {figures['plain_ms']:.2f} ms a token, assisted {figures['assisted_ms']:.2f} ms a step of "
            f"{figures['tokens_per_step']:.2f} tokens",
            flush=True,
        )
        self.work.keep("speed", "transformers", figures | {"rows": rows, "hardware": hardware_name(self.device)})


def describe(row):
    """A row as a line."""
    return (
        f"{row['source']:16} {row['draft']:11}  batch {row['batch']:2}  {row['subject']:11}  T {row['temperature']:g}  "
        f"{row['mean']:.2f} ms a step, at {row['asked']:.2f} tokens a step {row['tokens_per_second']:.0f} tokens/s, "
        f"{row['speedup']:.2f} times plain decoding"
    )
