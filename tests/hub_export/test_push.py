"""`--push-to-hub`, through the command line and a real HTTP server: what arrives is what was exported, byte by byte."""

import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export.export import main


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    head = Medusa(MedusaConfig(16, 33, num_heads=2, base_model_name_or_path="some/target"))
    save_head(head, tmp_path / "run" / "head")
    return tmp_path / "run"


def push(source, output, hub, *arguments, token="hf_dummy"):
    """Run the command in a process of its own, as a user does."""
    command = ["-m", "headstart.hub_export.export", *arguments_of(source, output), *arguments]
    return run_python(command, output.parent, hub, **({"HF_TOKEN": token} if token else {}))


def run_python(command, folder, hub, **environment):
    ours = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")} | environment
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    command = [sys.executable, *command]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=kept | ours, timeout=120)


def arguments_of(source, output):
    return [str(source), "--format", "medusa", "--output", str(output)]


@pytest.fixture
def run_here(source, fake_hub, monkeypatch):
    """Run the command in this process, which is faster, with huggingface_hub's settings changed to suit."""
    monkeypatch.setattr(constants, "ENDPOINT", fake_hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_dummy")
    return lambda output, *arguments: main([*arguments_of(source, output), *arguments])


@pytest.fixture
def error_of(run_here, tmp_path, capsys):
    """Run the command, to `tmp_path / "out"`, and return the one line that it fails with."""

    def run(*arguments):
        assert run_here(tmp_path / "out", *arguments) == 1
        captured = capsys.readouterr()
        assert "pushed" not in captured.out
        *_, last = captured.err.strip().splitlines()
        assert last.startswith("heads.export: ")
        return last

    return run


def test_every_file_arrives_byte_by_byte_in_a_private_repository(source, tmp_path, fake_hub):
    result = push(source, tmp_path / "first-medusa", fake_hub, "--push-to-hub", "team/first", "--private")
    assert result.returncode == 0, result.stderr
    assert f"pushed to {fake_hub.url}/team/first" in result.stdout
    assert list(fake_hub.repositories) == ["team/first"]
    assert fake_hub.repositories["team/first"]["private"] is True
    written = {path.name: path.read_bytes() for path in (tmp_path / "first-medusa").iterdir()}
    assert fake_hub.repositories["team/first"]["files"] == written
    assert set(written) == {
        "README.md",
        "config.json",
        "medusa_lm_head.pt",
        "medusa_lm_head.safetensors",
        "replay.json",
    }
    assert '"model": "team/first"' in written["README.md"].decode()
    assert len([line for line in fake_hub.requests if line.startswith("PUT /storage/")]) == 2


def test_a_pushed_head_loads_by_its_id_and_then_without_network(source, run_here, tmp_path, fake_hub):
    (source / "tree.json").write_text('{"parents": [-1, 0], "ranks": [0, 0]}')
    assert run_here(tmp_path / "out", "--push-to-hub") == 0
    script = (
        "import sys, torch; from headstart.heads.checkpoint import load_head, resolve_head;"
        "one, other = load_head('tester/out'), load_head(sys.argv[1]); assert one.config == other.config;"
        "assert (resolve_head('tester/out') / 'tree.json').is_file();"
        "print(all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters())))"
    )
    for environment in ({"HF_TOKEN": "hf_dummy"}, {"HF_HUB_OFFLINE": "1"}):
        result = run_python(["-c", script, str(source)], tmp_path, fake_hub, **environment)
        assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize("arguments", [["--push-to-hub"], ["--push-to-hub", "first-medusa"]])
def test_repository_defaults_to_the_account_and_the_folder(run_here, tmp_path, fake_hub, arguments):
    assert run_here(tmp_path / "first-medusa", *arguments) == 0
    assert list(fake_hub.repositories) == ["tester/first-medusa"]
    assert fake_hub.repositories["tester/first-medusa"]["private"] is False


def test_a_pushed_head_can_be_pushed_again(run_here, tmp_path, fake_hub):
    files = []
    for output, arguments in (("one", ()), ("two", ("--dtype", "bfloat16"))):
        assert run_here(tmp_path / output, "--push-to-hub", "tester/same", *arguments) == 0
        files.append(dict(fake_hub.repositories["tester/same"]["files"]))
    assert files[0].keys() == files[1].keys()
    assert files[0]["medusa_lm_head.pt"] != files[1]["medusa_lm_head.pt"]
    assert files[1]["medusa_lm_head.pt"] == (tmp_path / "two" / "medusa_lm_head.pt").read_bytes()


def test_without_a_token_nothing_is_done(source, tmp_path, fake_hub):
    result = push(source, tmp_path / "out", fake_hub, "--push-to-hub", token=None)
    assert result.returncode == 1
    assert result.stderr.startswith("heads.export: no Hugging Face token to push with: run `hf auth login`")
    assert result.stderr.count("\n") == 1
    assert [line for line in fake_hub.requests if "agent-harnesses" not in line] == []
    assert not (tmp_path / "out").exists()


def test_a_wrong_token_stops_before_any_work(error_of, tmp_path, fake_hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "did not accept the token" in error_of("--push-to-hub")
    assert fake_hub.repositories == {}
    assert not (tmp_path / "out").exists()


def test_offline_mode_stops_before_any_work(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of("--push-to-hub")
    assert not (tmp_path / "out").exists()


def test_no_network_stops_before_any_work(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub at http://127.0.0.1:9" in error_of("--push-to-hub")
    assert not (tmp_path / "out").exists()


def test_a_name_the_hub_does_not_take_stops_before_any_work(error_of, tmp_path):
    assert "cannot push to 'a/b/c'" in error_of("--push-to-hub", "a/b/c")
    assert not (tmp_path / "out").exists()


def test_private_heads_do_not_go_to_a_public_repository(error_of, fake_hub):
    fake_hub.repositories["tester/out"] = {"private": False, "files": {}}
    assert "exists already and is public" in error_of("--push-to-hub", "--private")
    assert fake_hub.repositories["tester/out"]["files"] == {}


def test_heads_are_not_mixed_with_other_weights(error_of, fake_hub):
    fake_hub.repositories["tester/out"] = {"private": False, "files": {"model.safetensors": b"others"}}
    assert "other weights already (model.safetensors)" in error_of("--push-to-hub")
    assert fake_hub.repositories["tester/out"]["files"] == {"model.safetensors": b"others"}


def test_a_push_that_fails_keeps_the_export_and_says_how_to_push_it(error_of, tmp_path, fake_hub):
    fake_hub.fail_commits = True
    last = error_of("--push-to-hub")
    assert "exceeded your storage limit" in last
    assert f"`hf upload tester/out {tmp_path / 'out'}`" in last
    assert len(list((tmp_path / "out").iterdir())) == 5
