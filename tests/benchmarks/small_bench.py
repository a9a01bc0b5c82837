"""A tiny Llama to measure, quick stand-ins for slow measurements, and `headstart bench` with both."""

import json

import pytest
from transformers import LlamaConfig

from headstart.benchmarks import floor
from headstart.benchmarks.engine import startup
from headstart.cli import main

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A folder with the config of a tiny Llama."""
    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    """Measure the rates of copies and products at sizes that take no time, first tokens without the pauses that a GPU needs."""
    monkeypatch.setattr(startup, "IDLE", 0)
    monkeypatch.setitem(floor.COPIED_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(floor.SQUARE, "cpu", 64)


@pytest.fixture
def bench(shape, capsys):
    """Run `headstart bench` on the tiny shape.  -> (the lines before the object, the object)"""

    def run(what, *arguments):
        assert main(["bench", what, *arguments, "--shape", shape, *CPU]) == 0
        *lines, last = capsys.readouterr().out.strip().splitlines()
        return lines, json.loads(last)

    return run


def check_times(row):
    assert 0 < row["p20"] <= row["p50"] <= row["p80"]
