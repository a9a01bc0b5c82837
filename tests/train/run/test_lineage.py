"""What W&B is told of a run's data: train/run/lineage.py."""

from types import SimpleNamespace

import pytest
from torch import nn

from headstart.train.run.lineage import find_sources


@pytest.mark.parametrize(
    ("data", "uri"),
    [
        ("some/conversations", "https://huggingface.co/datasets/some/conversations"),
        ("some/conversations:train_sft", "https://huggingface.co/datasets/some/conversations"),
        ("stdlib", ""),
        ("stdlib:train", ""),
    ],
)
def test_data_are_pointed_at_without_their_split(data, uri, tmp_path):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_commit_hash=None)
    _, source = find_sources(SimpleNamespace(target=str(tmp_path), data=data), model, 3)
    assert (source.uri, source.metadata["name"]) == (uri, data)
