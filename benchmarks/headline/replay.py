"""The fifth stage: what the measured acceptances would bring a large model. Its tokens are drawn by chance, its steps are real.

A model of the shape has random weights, and so has what drafts for it, in the size of published heads (random_heads.py) or of a
tenth of the model. The verifier `synthetic` accepts as many drafts a step as were measured on the small target; the rate is that of
the steady state, beside plain decoding in the same process. So this is a large model's speed with a small model's acceptance: heads
of large models, trained for long, accept more, and larger targets are harder to draft for. Trees are the static ones of the fourth
stage, for one request; many at once are measured with chains, because 64 trees of 64 nodes take longer than they bring.
"""

import random
import tempfile
import time
from pathlib import Path

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


class Replay:
    """A model of the shape with random weights, and plain decoding on it."""

    def __init__(self, settings, work, device):
        self.settings, self.work, self.device = settings, work, device
        self.shape = str(work.target) if settings.shape == "target" else settings.shape
        self.config = config_of_shape(self.shape)
        self.config.eos_token_id = None  # outputs are random, and none ends early
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        check_fits(self.shape, device, dtype, num_bytes=lambda *of: bytes_with_head(*of, "medusa", settings.depth))
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
        llm, self.plain = self.engine(None), {}
        for batch in dict.fromkeys((1, settings.batch)):
            self.plain[batch] = self.step(llm, batch)
            print(f"plain, batch {batch}: {self.plain[batch]['tokens_per_second']:.0f} tokens/s", flush=True)

    def engine(self, speculative):
        release(self.device)
        return LLM(
            self.base,
            max_model_len=self.length,
            max_num_seqs=self.settings.batch,
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
            **Times.of(steps).as_dict(),
            "steps": len(steps),
        }

    def out_of_time(self):
        return time.perf_counter() - self.began > 60 * self.settings.speed_minutes

    def measure(self, source):
        """Measure one source at every acceptance that the fourth stage found for it. Keeps its rows, if time sufficed for all."""
        found = self.work.needs("acceptance", source.slug)
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            speculative = self.speculation(source)
            for measured in found["rows"]:
                chain = measured["draft"] == "chain"
                if measured["batch"] != self.settings.batch or measured["draft"] not in ("chain", "static tree"):
                    continue
                if self.out_of_time():
                    print(
                        f"{source.name}: not finished in --speed-minutes {self.settings.speed_minutes:g}; the same command goes on",
                        flush=True,
                    )
                    return
                tree = "chain"
                if not chain:
                    tree = Path(folder) / "tree.json"
                    tree.write_text(found["trees"][f"{measured['temperature']:g}"])
                asked = round(measured["acceptance_length"], 4)
                config = speculative | {"tree": str(tree), "verifier": "synthetic", "acceptance_length": asked}
                config |= {"num_speculative_tokens": measured["depth"]}
                llm = self.engine(config)
                for batch in dict.fromkeys((1, self.settings.batch) if chain else (1,)):
                    row = self.row(measured, llm, batch, asked)
                    if row:
                        rows.append(row)
                        print(describe(row), flush=True)
                del llm
        figures = {"name": source.name, "rows": rows, "plain": self.plain, "shape": self.settings.shape}
        self.work.keep("speed", source.slug, figures | {"hardware": hardware_name(self.device)})

    def row(self, measured, llm, batch, asked):
        """A row of the second table; None if outputs were too short for a steady state."""
        row = {"table": "speed"} | {name: measured[name] for name in ("source", "draft", "nodes", "depth")}
        row |= {name: measured[name] for name in ("subject", "temperature")} | {"batch": batch, "asked": asked}
        try:
            row |= self.step(llm, batch)
        except NoSteadyState as error:
            print(f"{row['source']} {row['draft']}, batch {batch}: left out, {error}", flush=True)
            return None
        return row | {"speedup": row["tokens_per_second"] / self.plain[batch]["tokens_per_second"]}

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
        f"{row['tokens_per_step']:.2f} tokens a step (asked {row['asked']:.2f}), {row['p50']:.2f} ms, "
        f"{row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f} times plain decoding"
    )
