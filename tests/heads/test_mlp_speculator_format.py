"""MLP speculators survive their file format bit by bit, and what is wrong with a file is said by name."""

import pytest
import torch

from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.heads.mlp_speculator_format import from_file, recognises, to_file
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


def test_a_tied_file_may_repeat_what_steps_share_but_not_change_it():
    tensors, config = to_file(make(steps=3, tied=True))
    whole = dict(tensors)
    for step in (1, 2):
        for name in ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
            whole["speculator." + name.format(step)] = tensors["speculator." + name.format(0)].clone()
    whole["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()
    shape, state, *_ = from_file(whole, config)
    assert shape.num_steps == 3
    assert {"speculator." + name for name in state} == set(tensors)
    whole["speculator.head.2.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"tied, but speculator.head.2.weight is not speculator.head.0.weight"):
        from_file(whole, config)


def test_what_a_config_leaves_out_is_what_readers_take_it_for():
    tensors, config = to_file(make(steps=2, scaled=False))
    for key in ("scale_input", "tie_weights", "n_predict"):
        del config[key]
    assert from_file(tensors, config)[0] == make(steps=2).config
    square = MLPSpeculator(make().config.__class__(S, V, S, 2, False, False))
    tensors, config = to_file(square)
    assert from_file(tensors, config | {"inner_dim": 0})[0].inner_size == S


def broken(change, keys=None, **options):
    tensors, config = to_file(make(steps=2, **options))
    change(tensors)
    return tensors, config | (keys or {})


@pytest.mark.parametrize(
    ("change", "keys", "tied", "message"),
    [
        (lambda t: t.pop("speculator.ln.1.bias"), {}, False, r"missing: speculator.ln.1.bias"),
        (lambda t: t.update({"speculator.extra": torch.ones(1)}), {}, False, r"unexpected: speculator.extra"),
        (lambda t: t.update({"speculator.head.10000000.weight": torch.ones(1)}), {}, False, r"missing: .* more"),
        (lambda t: t.pop("speculator.emb.0.weight"), {}, False, r"emb.0.weight is missing"),
        (
            lambda t: t.update({"speculator.proj.1.weight": torch.ones(S, S + 1)}),
            {},
            False,
            rf"proj.1.weight is \({S}, {S + 1}\), expected \({S}, {S}\)",
        ),
        (
            lambda t: t.update({"speculator.ln.0.weight": torch.ones(S, dtype=torch.int64)}),
            {},
            False,
            r"ln.0.weight is torch.int64, expected floating point",
        ),
        (lambda t: None, {"n_predict": None}, True, r'must say "n_predict", from 1 to 64; it says None'),
        (lambda t: None, {"tie_weights": "yes"}, False, r"\"tie_weights\": 'yes', expected true or false"),
        (lambda t: None, {"vocab_size": 7}, False, rf'"vocab_size": 7, its tensors say {V}'),
        (lambda t: None, {"inner_dim": 0}, False, rf'"inner_dim": {H}, its tensors say {S}'),
    ],
)
def test_what_is_wrong_with_a_file_is_named(change, keys, tied, message):
    with pytest.raises(ValueError, match=message):
        from_file(*broken(change, keys, tied=tied))
