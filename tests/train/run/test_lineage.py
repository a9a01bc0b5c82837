"""What W&B is told of a run's data and of the head that it starts from: train/run/lineage.py."""

from types import SimpleNamespace

import pytest
from torch import nn

from headstart.train.run import lineage
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
    _, source = find_sources(SimpleNamespace(target=str(tmp_path), data=data, start_from=""), model, 3)
    assert (source.uri, source.metadata["name"]) == (uri, data)


def test_start_from_the_hub_is_pointed_at_with_the_commit_that_was_read(tmp_path, monkeypatch):
    commit = tmp_path / "snapshots" / "c0ffee"
    commit.mkdir(parents=True)
    (commit / "config.json").write_text("{}")
    (commit / "README.md").write_text("---\nlicense: mit\n---\n")

    def look(name, file, revision=None):
        assert (name, revision) in (("some/head", "main"), ("some/head", "c0ffee"))
        return str(commit / file)

    monkeypatch.setattr(lineage, "try_to_load_from_cache", look)
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_commit_hash=None)
    recipe = SimpleNamespace(target=str(tmp_path), data="stdlib", start_from="some/head@main")
    *_, start = lineage.find_sources(recipe, model, 3)
    assert (start.role, start.uri) == ("start", "https://huggingface.co/some/head/tree/c0ffee")
    assert start.metadata == {"name": "some/head@main", "revision": "c0ffee", "licence": "mit"}


def test_start_of_a_run_is_its_folder(tmp_path):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_commit_hash=None)
    recipe = SimpleNamespace(target="some/target", data="stdlib", start_from=str(tmp_path))
    *_, start = lineage.find_sources(recipe, model, 3)
    assert (start.uri, start.metadata["revision"]) == (tmp_path.as_uri(), None)


@pytest.mark.parametrize("start_from", ["{}/runs/first", "runs/first", "runs/first@", "~/runs/first", "a/b/c@d"])
def test_start_that_is_gone_is_named_and_not_linked(start_from, tmp_path, monkeypatch):
    """A folder may have the form of a Hub id, and a path that has not must not end the lineage of target and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_commit_hash=None)
    start_from = start_from.format(tmp_path)
    recipe = SimpleNamespace(target=str(tmp_path), data="some/data", start_from=start_from)
    target, data, start = find_sources(recipe, model, 3)
    assert (target.uri, data.uri) == (tmp_path.as_uri(), "https://huggingface.co/datasets/some/data")
    assert (start.uri, start.metadata["name"], start.metadata["licence"]) == ("", start_from, None)
