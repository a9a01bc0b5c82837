"""Benchmarks of single operations on the CPU, with the references: each is timed beside its floor, and the baseline's losses equal
ours. No figure is judged."""

import pytest
import torch

from headstart.benchmarks.ops.linear_sweep import cases_of
from headstart.benchmarks.ops.losses import KL_WEIGHT, torch_losses
from headstart.cli import main
from headstart.kernels.training.distill_loss import LOSSES, distill_loss
from headstart.kernels.training.target_distribution import target_distribution
from headstart.tests.benchmarks.small_bench import CPU, check_times


@pytest.mark.parametrize(
    "op",
    [
        "linear", "gated_mlp", "attention", "rms_norm", "layer_norm", "rotary", "embedding", "res_block", "sample", "verify",
        "commit", "distill-loss", "trained-parts", "block-convolution",
    ],
)  # fmt: skip
def test_kernel_times_every_operation(bench, op):
    _, found = bench("kernel", op, "--rows", "1,5", "--context", "70", "--repeats", "2")
    assert found["rows"]
    for row in found["rows"]:
        check_times(row)
        assert row["floor"] > 0
    assert {row["rows"] for row in found["rows"]} <= {1, 5}


@pytest.mark.parametrize("name", LOSSES)
def test_the_plain_losses_are_the_kernels(name):
    """The plain losses, the baseline of the training benchmarks, equal the kernel's losses and gradients."""
    logits, target = torch.randn(2, 9, 31, generator=torch.Generator().manual_seed(0))
    labels, valid = torch.arange(9), torch.ones(9, dtype=torch.bool)
    z = logits.clone().requires_grad_()
    plain = torch_losses(z, labels, target.log_softmax(-1), name, KL_WEIGHT)
    (0.5 * plain).sum().backward()
    figures = distill_loss(
        logits, labels, valid, target_distribution(target), name=name, kl_weight=KL_WEIGHT, factor=0.5
    )
    torch.testing.assert_close(figures.loss, plain.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, z.grad, rtol=1e-4, atol=1e-6)


def test_kernel_distill_loss_has_every_loss_and_a_draft_vocabulary(bench, monkeypatch):
    monkeypatch.setattr("headstart.benchmarks.ops.losses.DRAFT_VOCABULARY", 40)
    _, found = bench("kernel", "distill-loss", "--rows", "3", "--repeats", "2")
    assert [(row["op"], row["what"]) for row in found["rows"]] == [
        ("target_distribution", "128"), *(("distill_loss", f"{name}, 128") for name in LOSSES),
        ("target_distribution", "40 of 128"), ("distill_loss", "kl, 40 of 128"),
    ]  # fmt: skip
    assert all(row["library"] > 0 for row in found["rows"])


def test_kernel_linear_sums_up_a_layer(bench):
    lines, found = bench("kernel", "linear", "--rows", "3", "--repeats", "2")
    assert any("a layer's four products at 3 rows" in line for line in lines)
    assert found["facts"]["layer_rate_of_library_at_3_rows"] > 0


def test_the_sweep_tries_launches_for_every_product_rows_and_splits():
    cases = cases_of({"o": (512, 512), "gate_up": (1024, 512)}, (1, 80, 2048), torch.bfloat16)
    kinds = {(case.name, case.count, case.splits, type(case.launch).__name__) for case in cases}
    few = {("o", count, splits, "Launch") for count in (1, 80) for splits in (1, 2, 4)}
    many = {("o", 2048, splits, "PrefillLaunch") for splits in (1, 2, 4)} | {("gate_up", 2048, 1, "PrefillLaunch")}
    assert kinds == few | many | {("gate_up", 1, 1, "Launch"), ("gate_up", 80, 1, "Launch")}
    assert len(set(cases)) == len(cases) > 100
    more = cases_of({"o": (512, 512)}, (16384,), torch.bfloat16)  # more row tiles of 64 than programs
    assert {case.launch.rows for case in more if case.launch.handover} == {128, 192, 256}
    few = cases_of({"o": (512, 512), "gate_up": (1024, 512)}, (96, 128), torch.bfloat16)
    shared = [case for case in few if getattr(case.launch, "handover", False)]
    assert {(case.name, case.count, case.splits) for case in shared} == {("o", 128, splits) for splits in (1, 2, 4)}
    assert {case.launch.features for case in shared} == {64, 128, 256}


def test_every_verifier_has_a_line_with_and_without_filters(shape, capsys):
    assert main(["bench", "kernel", "rules", "--shape", shape, "--rows", "10", "--repeats", "1", *CPU]) == 0
    printed = capsys.readouterr().out
    for name, size in (("recursive", "1 x 10"), ("traversal", "1 x 10"), ("token", "2 x 5"), ("block", "2 x 5")):
        assert f"{name}, {size} " in printed
        assert f"{name}, {size}, cut " in printed
    assert printed.count("strict, ") == 4 * 2, "in the table and in the JSON"
