"""heads.export and a stranger's files, names that a shell or Python reads otherwise, and interrupts."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.storage.atomic_write import staged_folder
from headstart.hub_export import export
from headstart.hub_export.export import main
from headstart.hub_export.inspect_head import describe
from headstart.hub_export.replay_file import read_replay


@pytest.fixture
def head(tmp_path):
    torch.manual_seed(0)
    save_head(Medusa(MedusaConfig(16, 33, 2, 1, False, "some/target")), tmp_path / "head")
    return tmp_path / "head"


def error_of(capsys, *words):
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def change(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("file", "keys", "message"),
    [
        ("tree.json", {"rates": "x"}, "tree.json: rates should be a list, found 'x'"),
        ("tree.json", {"rates": [[0.5], 1]}, "rates[1] should be a list, found 1"),
        ("tree.json", {"choice": {"batch_size": 1}}, "choice.hardware should be a string, found None"),
        ("acceptance.json", {"step": 3}, "acceptance_length should be a number, found None"),
        ("acceptance.json", {"acceptance_length": "much"}, "acceptance_length should be a number, found 'much'"),
        ("benchmark.json", {"rows": [1]}, "rows[0] should be an object, found 1"),
        ("replay.json", {"version": 1, "acceptance": {"a": 1}}, "replay.json: acceptance should be a list"),
        (
            "replay.json",
            {"version": 1, "acceptance": [{"temperature": 0}]},
            "acceptance[0].acceptance_length should be",
        ),
        ("replay.json", {"version": 1, "prompts": [["a"]]}, "prompts[0][0] should be a whole number, found 'a'"),
        ("replay.json", {"version": 1, "recipe": 5}, "recipe should be an object, found 5"),
        ("replay.json", {"version": 1, "origin": {"name": "a"}}, "origin.on_hub should be true or false, found None"),
        ("config.json", {"base_model_name_or_path": 5}, "the target that its config names, 5, is not the name"),
        ("config.json", {"base_model_name_or_path": "you/a\nb"}, "is not the name of a folder or repository"),
    ],
)
def test_figures_of_another_shape_are_named(head, tmp_path, capsys, file, keys, message):
    path = head / file
    if not path.is_file():
        path.write_text(json.dumps({"parents": [-1, 0], "ranks": [0, 0]} if file == "tree.json" else {}))
    change(path, **keys)
    said = error_of(capsys, head, "--format", "medusa", "--output", tmp_path / "out")
    assert message in said, said
    assert said.count("\n") == 1
    if file != "config.json":
        assert any(message in problem for problem in describe(head, head)["problems"])


@pytest.mark.parametrize("keys", [{"files": None}, {"tensors": [1]}, {"drawn": {}}, {"acceptance": {"a": 1}}])
def test_a_replay_of_another_shape_is_not_verified(head, tmp_path, keys):
    assert main([str(head), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    read_replay(tmp_path / "out")
    change(tmp_path / "out" / "replay.json", **keys)
    with pytest.raises(ValueError, match=rf"replay\.json: {next(iter(keys))} should be"):
        read_replay(tmp_path / "out")


def test_a_target_may_be_called_as_folders_are(head, tmp_path):
    change(head / "config.json", base_model_name_or_path="/data/模型\u3000v1/a\xa0b")
    assert main([str(head), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    assert load_head(tmp_path / "out").config.base_model_name_or_path.endswith("a\xa0b")


def test_tensors_of_several_dtypes_are_written_as_one(head, tmp_path, capsys):
    path = head / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    save_file({name: t.bfloat16() if name.endswith("1.weight") else t for name, t in tensors.items()}, path)
    assert "heads.export --dtype" in error_of(capsys, head, "--format", "medusa", "--output", tmp_path / "out")
    words = [str(head), "--format", "medusa", "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
    (head / "acceptance.json").write_text(json.dumps({"acceptance_length": 1.5, "per_position": [0.5]}))
    assert main(words) == 0
    assert {tensor.dtype for tensor in load_head(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert "before the weights were cast" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["ex ünï m", "it's", 'a "b" $(c)'])
def test_commands_of_a_card_are_read_as_they_are_meant(head, tmp_path, name):
    assert main([str(head), "--format", "medusa", "--output", str(tmp_path / name)]) == 0
    card = (tmp_path / name / "README.md").read_text()
    (python,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    strings = [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]
    assert name in strings
    for block in re.findall(r"```sh\n(.*?)```", card, re.DOTALL):
        assert name in shlex.split(block.replace("\\\n", " ")), block


@pytest.mark.parametrize("name", ["you/target@main", "a b/c d", "./nowhere"])
def test_a_target_that_nobody_can_load_is_not_named(head, tmp_path, capsys, name):
    said = error_of(capsys, head, "--format", "medusa", "--output", tmp_path / "out", "--base-model", name)
    assert "is neither a folder here nor OWNER/NAME of the Hub" in said
    assert ("a revision cannot be named" in said) == ("@" in name)


def test_the_folder_one_is_in_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="is the folder you are in, which"), staged_folder("."):
        pass
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    (tmp_path / "mount").mkdir()
    with pytest.raises(ValueError, match="is a mount point"), staged_folder(tmp_path / "mount"):
        pass


def test_a_reader_that_has_left_ends_no_export(head, tmp_path):
    command = [sys.executable, "-m", "headstart.hub_export.export", str(head), "--format", "medusa", "--output"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, str(tmp_path / "out")], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_head(tmp_path / "out").num_speculative_tokens == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(head, tmp_path, capsys, monkeypatch, number):
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(*given, **options):
        if number == signal.SIGINT:  # which a process in the background does not hear
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)

    monkeypatch.setattr(export, "write_beside", interrupted)
    with pytest.raises(SystemExit) as end:
        main([str(head), "--format", "medusa", "--output", str(tmp_path / "out")])
    assert end.value.code == 128 + number
    assert ("interrupted; nothing half-written is left" in capsys.readouterr().err) == (number == signal.SIGINT)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert signal.getsignal(signal.SIGTERM) is before
