"""A published checkpoint as published.py's modules describe it: the content of its files, and the expected result of reading it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from headstart.tests.heads.test_eagle import H, text

STEPS = 3  # of EAGLE-3
FEATURES, TOKENS = text(width=3 * H, steps=(STEPS,))


@dataclass(frozen=True)
class Published:
    """One checkpoint and the expected result of reading it."""

    tensors: dict
    config: dict
    logits: Callable  # () -> the logits that a reader must compute, one tensor per depth
    format: str
    notes: tuple = ()  # patterns of all notes on its config
    file_name: str = "model.safetensors"
    num_shards: int = 1

    def write(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save = torch.save if self.file_name.endswith((".bin", ".pt")) else save_file
        if self.num_shards == 1:
            return save(self.tensors, folder / self.file_name)
        stem, _, suffix = self.file_name.rpartition(".")
        places = {
            name: f"{stem}-{1 + i % self.num_shards:05d}-of-{self.num_shards:05d}.{suffix}"
            for i, name in enumerate(self.tensors)
        }
        for shard in {*places.values()}:
            save({name: tensor for name, tensor in self.tensors.items() if places[name] == shard}, folder / shard)
        (folder / f"{self.file_name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def draw(shapes, seed=5):
    """Random tensors of these shapes, all different; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {name: 1 + value if "norm" in name else value for name, value in found.items()}


def wide(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


def prefixed(prefix, tensors, outside=()):
    return {name if name in outside else prefix + name: tensor for name, tensor in tensors.items()}
