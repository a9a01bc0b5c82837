"""The heads of another run that a run starts from: train/run/start_head.py, by the scripts that take any."""

import pytest

from headstart.tests.train.tiny_runs import assert_same_tensors, head_tensors

OF = {"medusa": "Medusa heads", "mlp_speculator": "an MLP speculator"}


@pytest.mark.parametrize("family", OF)
def test_it_starts_from_the_weights_of_another_head(trainers, start, family):
    folder = start(family)
    run = trainers[family].run(max_steps=1, lr=0, start_from=folder)
    assert_same_tensors(head_tensors(run), head_tensors(folder.parent))


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("mlp_speculator", {"num_steps": 4}, "is a head of num_steps 3, this run asks for 4"),
        ("mlp_speculator", {"inner_size": 0}, "is a head of inner_size 24, this run asks for 32"),
        ("mlp_speculator", {"tie_weights": False}, "is a head of tie_weights True, this run asks for False"),
        ("mlp_speculator", {"scale_input": False}, "is a head of scale_input True, this run asks for False"),
        ("medusa", {"num_layers": 2}, "has num_layers 1, this run asks for 2"),
        ("joint", {"num_heads": 2}, "has num_heads 3, this run asks for 2"),
    ],
)
def test_start_of_another_shape_is_refused(trainers, start, tmp_path, family, keys, message):
    trainer = trainers[family]
    with pytest.raises(ValueError, match=message):
        trainer.main(start_from=start(trainer.training.family), **keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("family", "other"), [("mlp_speculator", "Medusa"), ("medusa", "MLP speculator")])
def test_start_of_another_family_or_from_nothing_is_refused(trainers, start, tmp_path, family, other):
    wrong = start("medusa" if family == "mlp_speculator" else "mlp_speculator")
    with pytest.raises(ValueError, match=f"holds a head of the family {other}, not {OF[family]}"):
        trainers[family].main(start_from=wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no head"):
        trainers[family].main(start_from=tmp_path / "empty")
    assert not (tmp_path / "run").exists()


def test_heads_trained_with_an_adapter_are_no_start(trainers, finished, tmp_path):
    with pytest.raises(ValueError, match="was trained with an adapter already"):
        trainers["joint"].main(start_from=finished("joint", max_steps=2))
    assert not (tmp_path / "run").exists()
