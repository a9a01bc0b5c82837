"""A small random Llama on disk."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.tests.inference.models.small_checkpoints import SHAPE


@pytest.fixture(params=["one file", "shards"])
def checkpoint(request, tmp_path):
    """(folder, config) of a random Llama, in one file or in several."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="10KB" if request.param == "shards" else "1GB")
    return folder, model.config
