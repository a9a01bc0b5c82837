"""A Hub that does not answer: every command says so after one question, and goes on with what the cache holds."""

import contextlib
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from headstart.cli import main as headstart
from headstart.heads.checkpoint import resolve_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.storage import hub_answer
from headstart.heads.storage.hub_answer import ask_hub, hub_options
from headstart.hub_export.export import main as export
from headstart.inference.models.adapter import find_adapter
from headstart.inference.models.checkpoint_files import find_files
from headstart.inference.models.target_source import load_tokenizer, target_config
from headstart.train.teacher.features import load_target


@pytest.fixture(autouse=True)
def asked_once(monkeypatch):
    monkeypatch.setattr(hub_answer, "PAUSES", ())
    monkeypatch.setattr(hub_answer, "KEPT", 10**6)
    monkeypatch.setattr(hub_answer, "_found", {})


@pytest.fixture
def silent(hub_here):
    """A Hub that breaks all connections."""
    hub_here.fail("", times=10**6)
    return hub_here


@pytest.fixture
def cached(hub_here, tmp_path):
    """The name of a head that was fetched once; now the Hub is silent."""
    torch.manual_seed(0)
    save_head(Medusa(MedusaConfig(16, 33, num_heads=2)), tmp_path / "head")
    words = ["--format", "medusa", "--output", str(tmp_path / "out"), "--push-to-hub", "me/it"]
    assert export([str(tmp_path / "head"), *words]) == 0
    resolve_head("me/it")
    hub_here.requests.clear()
    hub_answer._found.clear()
    hub_here.fail("", times=10**6)
    return "me/it"


def questions(hub):
    """The requests to the Hub, without the library's daily check of this machine."""
    return [line for line in hub.requests if not line.endswith("/agent-harnesses")]


CALLS = {
    "a head": lambda: resolve_head("me/it"),
    "an adapter": lambda: find_adapter("me/it"),
    "a target's config": lambda: target_config("me/it", "auto"),
    "a target's weights": lambda: find_files("me/it"),
    "a tokenizer": lambda: load_tokenizer("me/it", None),
    "a target to train with": lambda: load_target("me/it", torch.device("cpu")),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_libraries_do_not_repeat_what_nobody_answers(silent, what):
    with pytest.raises(ValueError, match=rf"{silent.url} .*does not answer.*disconnected"):
        CALLS[what]()
    assert questions(silent) == ["HEAD /"]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (lambda out: headstart(["inspect", "me/it"]), 2),
        (lambda out: headstart(["generate", "--model", "me/it", "x"]), 2),
        (lambda out: export(["verify", "me/it"]), 2),
        (lambda out: export(["me/it", "--format", "medusa", "--output", str(out)]), 2),
        (lambda out: export(["me/it", "--format", "medusa", "--output", str(out), "--push-to-hub", "me/it"]), 2),
    ],
)
def test_commands_say_it_after_one_question(silent, tmp_path, capsys, command, status):
    assert command(tmp_path / "out") == status
    assert f"the Hub at {silent.url}" in (said := capsys.readouterr().err)
    assert "does not answer: " in said
    assert questions(silent) == ["HEAD /"]


def test_a_hub_that_keeps_a_connection_and_says_nothing_is_given_up(hub_here, monkeypatch):
    hub_here.fail("", times=10**6, stall=True)
    monkeypatch.setattr(hub_answer, "PATIENCE", 0.05)
    assert "timed out after 0.05 s, which HF_HUB_ETAG_TIMEOUT changes" in ask_hub().words
    monkeypatch.setattr(hub_answer, "_found", {})
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.01)
    assert "after 0.01 s" in ask_hub().words


def test_what_is_in_the_cache_is_used(cached, hub_here, capsys):
    with contextlib.suppress(UserWarning), pytest.warns(UserWarning, match="did not answer whether me/it has a tree"):
        assert headstart(["inspect", cached]) == 0
    assert "Medusa, 2 heads" in capsys.readouterr().out
    assert questions(hub_here) == ["HEAD /"]


def test_what_is_answered_is_asked_again_later(hub_here, monkeypatch):
    hub_here.fail("HEAD /", times=1)
    assert hub_options("me/it") == {"local_files_only": True}
    assert hub_options("me/it") == {"local_files_only": True}
    assert hub_options(Path(__file__).parent) == {}
    monkeypatch.setattr(hub_answer, "KEPT", -1)
    assert hub_options("me/it") == {}
    assert questions(hub_here) == ["HEAD /"] * 2


def test_a_connection_that_breaks_once_is_no_silence(hub_here, monkeypatch):
    hub_here.fail("HEAD /", times=1)
    monkeypatch.setattr(hub_answer, "PAUSES", (0,))
    assert ask_hub().why == ""
    assert questions(hub_here) == ["HEAD /"] * 2


def test_offline_nobody_is_asked(silent, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in ask_hub().words
    assert hub_options("me/it") == {}
    assert silent.requests == []
