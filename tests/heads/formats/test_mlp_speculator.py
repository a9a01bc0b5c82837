"""MLP speculators survive their file format bit by bit. Published files: test_published.py."""

import pytest
import torch

from headstart.heads.formats.mlp_speculator import from_file, recognises, to_file
from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.tests.heads.test_mlp_speculator import H, S, V, make


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_what_is_written_is_read_bit_by_bit(steps, tied, scaled):
    head = make(steps, tied, scaled)
    tensors, config = to_file(head)
    assert recognises(tensors)
    shape, state, *_ = from_file(tensors, config)
    assert shape == head.config
    other = MLPSpeculator(shape).double()
    other.load_state_dict(state)
    features, tokens = torch.randn(2, H, dtype=torch.float64), torch.randint(V, (2, steps))
    for one, two in zip(head(features, tokens)[0], other(features, tokens)[0]):
        assert torch.equal(one, two)


def test_names_and_keys_are_the_published_ones():
    tensors, config = to_file(make(steps=2))
    shapes = {"emb": (V, S), "ln": (S,), "head": (V, S)}
    expected = {f"speculator.{kind}.{i}.weight": shape for kind, shape in shapes.items() for i in (0, 1)}
    expected |= {f"speculator.ln.{i}.bias": (S,) for i in (0, 1)}
    expected |= {"speculator.proj.0.weight": (S, H), "speculator.proj.1.weight": (S, S)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert config["model_type"] == "mlp_speculator"
    assert [config[key] for key in ("emb_dim", "inner_dim", "n_predict", "vocab_size")] == [H, S, 2, V]
    assert len(config["top_k_tokens_per_head"]) == 2
    kept = {"emb.0.weight", "proj.0.weight", "proj.1.weight", "ln.0.weight", "ln.0.bias", "head.0.weight"}
    assert set(to_file(make(steps=4, tied=True))[0]) == {"speculator." + name for name in kept}
