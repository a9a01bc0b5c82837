"""`headstart bench train` on the CPU with a tiny shape: counts, output and refusals. No figure is judged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from headstart.benchmarks import floor
from headstart.benchmarks.ops.losses import torch_losses
from headstart.benchmarks.shape import config_of_shape
from headstart.benchmarks.training import training_steps
from headstart.benchmarks.training.train import HEADS, TrainSettings, build_steps
from headstart.cli import build_parser, main
from headstart.train.run.optimization import trained

CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A folder with the config of a tiny Llama."""
    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    """Measure the rate of products with a quick product, and take a draft vocabulary smaller than the tiny vocabulary."""
    monkeypatch.setitem(floor.SQUARE, "cpu", 64)
    monkeypatch.setattr("headstart.benchmarks.random_heads.DRAFT_VOCABULARY", 50)


def tiny(shape, **changes):
    settings = TrainSettings(
        shape, **{"sequence": 11, "rows": 2, "chunk_tokens": 12, "repeats": 2, "anchors": 4} | changes
    )
    return build_steps(settings, config_of_shape(shape), torch.device("cpu"), torch.float32)


def test_every_step_reads_its_rows_from_files(shape):
    run = tiny(shape)
    file = Path(run.folder.name, "tokens.npy")
    tokens = np.load(file, mmap_mode="r+")
    assert torch.equal(run.feed().inputs[0].flatten(), torch.from_numpy(tokens.astype(np.int64)))
    tokens[3] = (tokens[3] + 1) % 128
    run.feed()  # read ahead of the change
    assert torch.equal(run.feed().inputs[0].flatten(), torch.from_numpy(tokens.astype(np.int64)))


CASES = [(head, loss, "shared") for head in HEADS for loss in ("hard", "kl")] + [("medusa", "kl", "own")]


@pytest.mark.parametrize(("head", "loss", "lm_head"), CASES)
def test_operations_are_those_of_the_products_of_the_plain_loop(shape, head, loss, lm_head):
    run = tiny(shape, head=head, loss=loss, lm_head=lm_head)
    if head == "block":  # of 2 x 4 blocks of 8, cut where the row ends
        assert 8 < run.num_labels < 64
        assert len(run.label_places().unique()) < run.num_labels
    else:
        assert (run.num_tokens, run.num_labels) == (22, 18)
    with FlopCounterMode(display=False) as counter:
        run.gradients(run.plain)
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))  # attention takes others
    assert run.target_operations() + run.head_operations() == products


@pytest.mark.parametrize(("head", "loss", "lm_head"), CASES)
def test_both_ways_give_the_same_gradients(shape, head, loss, lm_head):
    run = tiny(shape, head=head, loss=loss, lm_head=lm_head)
    found = []
    for way in (run.ours, run.plain):
        found.append(run.gradients(way))
        found.append([parameter.grad.clone() for parameter in trained(run.head)])
        run.optimizer.zero_grad()
    # A KL divergence is a difference of log-probabilities near -5, which fp32 holds to 5e-7.
    assert found[0] == pytest.approx(found[2], rel=1e-5, abs=2e-6)
    for one, other in zip(found[1], found[3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
        assert other.abs().max() > 0


def test_no_figure_is_given_where_the_two_ways_disagree(shape, monkeypatch):
    run = tiny(shape)
    run.check_agreement(None)
    monkeypatch.setattr(training_steps, "torch_losses", lambda *given: 1.01 * torch_losses(*given))
    with pytest.raises(RuntimeError, match="loss and norm of the gradient differ"):
        run.check_agreement(None)


def test_a_step_leaves_the_weights_and_their_gradients_as_they_were(shape):
    run = tiny(shape)
    before = [parameter.clone() for parameter in run.head.parameters()]
    run.step(run.ours)
    assert all(torch.equal(*pair) for pair in zip(before, run.head.parameters()))
    assert all(parameter.grad is None for parameter in run.head.parameters())


@pytest.mark.parametrize("head", [["eagle3"], ["block", "--anchors", "3"]], ids=["eagle3", "block"])
def test_train_prints_memory_the_target_our_step_and_the_plain_one(shape, head, capsys):
    words = ["--head", *head, "--sequence", "9", "--repeats", "2", "--chunk-tokens", "4", *CPU]
    assert main(["bench", "train", "--shape", shape, *words]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert [row["what"] for row in found["rows"]] == ["target alone", "headstart", "plain loop"]
    for row in found["rows"]:
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        assert row["share"] == pytest.approx(row["tflops"] * 1e12 / found["facts"]["product_flops"], rel=1e-3)
    assert found["facts"]["faster"] > 0
    assert found["facts"]["estimated_gib"] >= 0
    memory = next(number for number, line in enumerate(lines) if line.startswith("memory: about "))
    assert memory < next(number for number, line in enumerate(lines) if "target alone" in line)
    assert any("as fast as the plain loop" in line for line in lines)


@pytest.mark.parametrize("head", ["eagle3", "block"])
def test_parts_of_a_step_are_its_phases_and_its_longest_operations(shape, head, capsys):
    words = ["--head", head, "--sequence", "9", "--repeats", "2", "--parts", *CPU]
    assert main(["bench", "train", "--shape", shape, *words]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    phases, kernels = found["rows"][3:8], found["rows"][8:]
    assert [row["what"] for row in phases] == ["rows", "target", "head", "gradients", "optimiser"]
    assert all(row["ms"] > 0 for row in phases)
    assert sum(row["of_step"] for row in phases) == pytest.approx(1, rel=1e-4)
    assert [row["ms"] for row in kernels] == sorted((row["ms"] for row in kernels), reverse=True)
    assert "aten::mm" in {row["what"] for row in kernels}
    assert found["facts"]["kernels_ms"] >= sum(row["ms"] for row in kernels) * 0.999


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequence", "65"], "--sequence must be from 3 to the 64 positions"),
        (["--loss", "ce"], "loss must be one of hard, kl, lk, lk-log, hard-l1, tv, got 'ce'"),
        (["--chunk-tokens", "0"], "--chunk-tokens must be at least 1, got 0"),
        (["--head", "eagle3", "--lm-head", "own"], "--lm-head own is for Medusa heads"),
        (["--anchors", "4"], "--anchors 4 is for block drafters, and --head medusa is none"),
        (["--head", "block", "--anchors", "0"], "--anchors must be at least 1, got 0"),
    ],
)
def test_train_refuses_what_cannot_be(shape, words, said, capsys):
    assert main(["bench", "train", "--shape", shape, *words, *CPU]) == 2
    assert said in capsys.readouterr().err


def test_train_calls_the_speculator_mlp_too():
    arguments = build_parser().parse_args(["bench", "train", "--shape", "llama-3-8b", "--head", "mlp"])
    assert arguments.head == "mlp_speculator"


def test_train_refuses_a_dtype_that_nothing_is_trained_in(shape, capsys):
    assert main(["bench", "train", "--shape", shape, "--device", "cpu", "--dtype", "float16"]) == 2
    assert "takes --dtype bfloat16 or float32, got float16" in capsys.readouterr().err
