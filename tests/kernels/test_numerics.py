"""The numerics version: it is raised whenever a number changes that orders a sum, or what is fused in a target's own module."""

import pytest
import torch

from headstart.inference.models.modules import fused_ops
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.kernels import numerics
from headstart.kernels.attention import attention_fold, tile_attention
from headstart.kernels.linear import linear, linear_table
from headstart.kernels.numerics import NUMERICS, Numerics, digest
from headstart.kernels.sampling import sample
from headstart.kernels.speculation import row_distributions
from headstart.tests.inference.models.small_architectures import small_model

# One entry per numerics version; old entries stay, so that a version never comes to mean other bits.
# 2: targets that run as their own module take packed products, fused norms and rotations.
RECORDED = {
    1: ("d01b132dec33", {}),
    2: (
        "d01b132dec33",
        {
            "llama": {"add + norm": 4, "gated": 2, "heads": 2, "product": 4},
            "opt": {"add + norm": 5, "heads": 2, "product": 2},
            "gpt_bigcode": {"add + norm": 5, "heads": 2},
            "mixtral": {"add + norm": 4, "heads": 2, "product": 2},
        },
    ),
}


def test_numerics_version_belongs_to_these_tables():
    assert max(RECORDED) == NUMERICS, "record the digest of this numerics version"
    assert (digest(), fused_kernels()) == RECORDED[NUMERICS], (
        "outputs get other bits: raise NUMERICS in kernels/numerics.py and record here what there is now"
    )


def fused_kernels():
    """How often small modules take each kernel that does the work of several operations, which the digest does not see."""
    return {name: dict(ModuleDecoder(small_model(name), 100)._fused) for name in RECORDED[NUMERICS][1]}


@pytest.mark.parametrize("name", ["silu", "cat", "add"])
def test_every_fusion_that_is_lost_is_noticed(name, monkeypatch):
    monkeypatch.setitem(fused_ops.FUSED, name, lambda *args, **kwargs: NotImplemented)
    assert fused_kernels() != RECORDED[NUMERICS][1]


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (linear_table, "SPLITS", linear_table.SPLITS | {(4096, 4096): 1}),
        (linear_table, "num_splits", lambda n, k: 1),
        (linear_table, "SPLIT_ALIGNMENT", 256),
        (linear_table, "FLOAT32", linear_table.FLOAT32._replace(depth=64)),
        (attention_fold, "PAGE", 128),
        (attention_fold, "CHUNKS", ((0, 256, 0), (2048, 512, 8))),
        (numerics, "num_warps", lambda block: 4),
        (sample, "SUM_CHUNK", 2048),
        (row_distributions, "SUM_CHUNK", 2048),
        (linear, "BLOCK_ROWS", 8),
        (linear, "FEATURES", {torch.float32: 16, torch.float64: 16}),
        (tile_attention, "TILE", 32),
        (tile_attention, "ROWS", 32),
    ],
    ids=lambda value: (
        getattr(value, "__name__", value).split(".")[-1] if not isinstance(value, dict | tuple | int) else ""
    ),
)
def test_every_number_that_orders_a_sum_changes_the_digest(where, name, value, monkeypatch):
    before = digest()
    monkeypatch.setattr(where, name, value)
    assert digest() != before


def test_speed_alone_changes_no_digest(monkeypatch):
    before = digest()
    for name in ("DECODE", "GATED_DECODE", "PREFILL_TILES"):
        monkeypatch.setattr(linear_table, name, {})
    monkeypatch.setattr(linear_table, "FLOAT32", linear_table.FLOAT32._replace(warps=8, features=128))
    assert digest() == before


def test_numerics_name_versions_device_and_dtype():
    found = Numerics.of(torch.device("cpu"), torch.bfloat16)
    assert (found.version, found.digest, found.torch, found.dtype) == (
        NUMERICS,
        digest(),
        torch.__version__,
        "bfloat16",
    )
    assert found.device
