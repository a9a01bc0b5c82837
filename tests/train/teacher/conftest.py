"""Feature caches in the test's folder, of few rows in many shards."""

import pytest
import torch

from headstart.tests.train.teacher.small_caches import NO_STOP, process
from headstart.train.teacher import feature_cache
from headstart.train.teacher.feature_cache import FeatureCache, describe


@pytest.fixture
def small_shards(monkeypatch):
    """Two rows in a forward, four in a shard of the last states in float32."""
    monkeypatch.setattr(feature_cache, "TOKENS_PER_FORWARD", 26)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 4 * 13 * 32 * 4)


@pytest.fixture
def open_cache(tmp_path):
    """open_cache(target, packed, ...) -> a FeatureCache in tmp_path/"cache", filled; `said` holds its notes."""

    def build(target, packed, layers=(), dtype=torch.float32, rank=0, world=1):
        said = build.said = []
        folder = tmp_path / "cache"
        cache = FeatureCache(
            folder, describe(target, packed, dtype, layers), target.dtype, process(rank, world), said.append
        )
        assert cache.fill(target, packed, NO_STOP)
        return cache

    return build
