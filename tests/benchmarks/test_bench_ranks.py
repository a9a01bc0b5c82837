"""`headstart bench ranks`: what it measures and compares. No figure is judged."""

import pytest
import torch

from headstart.benchmarks import floor
from headstart.benchmarks.floor import weight_bytes
from headstart.benchmarks.shape import random_decoder
from headstart.cli import main
from headstart.tests.benchmarks.small_bench import check_times
from headstart.tests.inference.ranks.forks import forked_workers

pytestmark = pytest.mark.usefixtures(forked_workers.__name__)

SMALL = ["--batch", "1,3", "--prompt-tokens", "9", "--new-tokens", "12", "--first-prompts", "20"]


def test_sizes_stand_beside_each_other_and_give_the_same_tokens(bench):
    said, found = bench("ranks", *SMALL, "-tp", "1,2", "--tensor-parallel-invariant", "2")
    rows = found["rows"]
    whats = ["first token of 20", "step of 1", "step of 3"]
    assert [(row["ranks"], row["what"]) for row in rows] == [(size, what) for size in (1, 2) for what in whats]
    for row in rows:
        check_times(row)
        assert row["same"]
        assert (row["over_floor"] is None) == row["what"].startswith("first")
    for one, two in zip(rows[:3], rows[3:], strict=True):
        assert one["of_one"] == 1
        assert two["of_one"] == pytest.approx(two["p50"] / one["p50"], rel=1e-4)
        if two["floor"]:
            assert two["floor"] < one["floor"]
    assert sum("yes" in line for line in said) == 6


def test_a_batch_without_a_steady_state_is_left_out(bench):
    said, found = bench("ranks", *SMALL, "--new-tokens", "2", "-tp", "1")
    assert [row["what"] for row in found["rows"]] == ["first token of 20"]
    assert [line for line in said if line.startswith("step of 3: left out, no steady state with 3 requests")]


def test_heads_are_timed_with_their_lm_heads_whole_and_divided(bench):
    drafting = ["--head", "medusa", "--new-tokens", "60"]
    _, found = bench("ranks", *SMALL, "-tp", "1,2", "--tensor-parallel-invariant", "2", *drafting)
    rows = [row for row in found["rows"] if row["drafts"]]
    ways = [(1, "medusa, whole"), (2, "medusa, whole"), (2, "medusa, divided")]
    assert [(row["ranks"], row["drafts"], row["what"]) for row in rows] == [
        (*way, what) for way in ways for what in ("step of 1", "step of 3")
    ]
    for row, one in zip(rows, 3 * rows[:2], strict=True):
        assert row["same"]
        assert row["floor"] is None
        assert row["of_one"] == pytest.approx(row["p50"] / one["p50"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-tp", "1,x"], "--tensor-parallel-size takes numbers separated by commas"),
        (["-tp", "3"], "tensor_parallel_size=3 does not divide the 4 query heads"),
        (["--prompt-tokens", "500"], "are beyond the shape's 512"),
    ],
)
def test_what_cannot_be_measured_is_told(shape, capsys, arguments, told):
    given = [*SMALL, *arguments, "--shape", shape, "--device", "cpu", "--dtype", "float32"]
    if arguments[0] == "--prompt-tokens":
        given += ["--new-tokens", "20"]
    assert main(["bench", "ranks", *given]) == 2
    assert told in capsys.readouterr().err


def test_the_floor_counts_every_weight_once(shape):
    decoder = random_decoder(shape, "cpu", torch.float32, 64)
    layer = decoder.layers[0]
    one = sum(x.weight.nbytes for x in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down))
    assert floor.layer_bytes(layer) == one + 2 * 4 * decoder.hidden_size
    assert weight_bytes(decoder) == 2 * floor.layer_bytes(layer) + 4 * decoder.hidden_size * (1 + len(decoder.lm_head))
