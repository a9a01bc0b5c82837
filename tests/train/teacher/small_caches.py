"""Small targets and rows for feature caches, and what of a cache is looked at."""

from types import SimpleNamespace

import numpy as np
import torch
import transformers

from headstart.train.data.packed.packing import pack
from headstart.train.teacher.features import FrozenTarget

CPU = torch.device("cpu")
NO_STOP = SimpleNamespace(agreed=lambda accelerator: False)


class Died(Exception):
    """What ends a fill in the middle."""


def make_target(seed=0, **changes):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = transformers.LlamaConfig(**shape | changes)
    return FrozenTarget(transformers.AutoModelForCausalLM.from_config(config).eval())


def packed_rows(seed=0):
    rng = torch.Generator().manual_seed(seed)
    documents = [
        torch.randint(0, 48, (int(n),), generator=rng).tolist() for n in torch.randint(3, 12, (30,), generator=rng)
    ]
    return pack([(ids, [True] * len(ids)) for ids in documents], 13)


def process(rank=0, world=1):
    return SimpleNamespace(
        num_processes=world,
        process_index=rank,
        is_main_process=rank == 0,
        device=CPU,
        wait_for_everyone=lambda: None,
    )


def read(cache, index):
    """The features of these rows on the CPU."""
    return cache.features(cache.read(index), CPU)


def everything(cache):
    return read(cache, np.arange(cache.description["num_rows"]))


def count_forwards(monkeypatch, until=None):
    """A list that grows with every forward of a FrozenTarget; the one after `until` of them dies."""
    calls, features = [], FrozenTarget.features

    def counted(self, *given):
        if len(calls) == until:
            raise Died
        calls.append(len(given[0]))
        return features(self, *given)

    monkeypatch.setattr(FrozenTarget, "features", counted)
    return calls
