"""heads.export: its files load again bit by bit, its card has only measured figures, and errors are one line."""

import ast
import errno
import json
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.cli import build_parser
from headstart.heads import checkpoint
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export import export
from headstart.hub_export.export import main
from headstart.hub_export.measurements import find_measurements
from headstart.hub_export.replay import compare_with_source

H, V = 16, 33
ROOT = Path(__file__).resolve().parents[2]


def make_head(num_heads=2, num_layers=1, shared=False, base="some/target"):
    torch.manual_seed(11)
    head = Medusa(MedusaConfig(H, V, num_heads, num_layers, shared, base))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


@pytest.fixture
def run(tmp_path):
    """A finished run with everything measured, and one checkpoint with an acceptance line of its own."""
    folder = tmp_path / "runs" / "first"
    save_head(make_head(), folder / "head")
    save_head(make_head(), folder / "checkpoints" / "step-000200" / "head")
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"lr": 0.0012, "target": "some/target", "output": "/home/someone/runs"})
    )
    (folder / "acceptance.json").write_text(
        json.dumps({"acceptance_length": 1.5678, "per_position": [0.4444, 0.1234], "num_steps": 4321})
    )
    lines = [
        {"step": 100, "kind": "acceptance", "acceptance_length": 1.11, "per_position": [0.11], "num_steps": 10},
        {"step": 200, "kind": "train", "loss": 3.0},
        {"step": 200, "kind": "acceptance", "acceptance_length": 1.22, "per_position": [0.22], "num_steps": 20},
        {"step": 300, "kind": "acceptance", "acceptance_length": 1.33, "per_position": [0.33], "num_steps": 30},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"head": str(folder / "head"), "temperature": 0.0, "draft": "chain of 2", "num_nodes": 3}
    row |= {"acceptance_length": 1.61, "tokens_per_second": 123.4, "speedup": 1.37, "identical": True, "num_tokens": 96}
    bench = {
        "hardware": "2 cores of a test",
        "date": "2026-11-20",
        "command": f"headstart bench --head {folder}",
        "rows": [row],
    }
    (folder / "benchmark.json").write_text(json.dumps(bench))
    (folder / "tree.json").write_text(json.dumps({"parents": [-1, 0, 0], "ranks": [0, 0, 1]}))
    return folder


def card_of(folder):
    """(front matter as a dict, the text below it) of a model card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def error_of(capsys, *arguments):
    """The one line, without a traceback, that a failing command prints."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("heads.export: ")
    assert captured.err.count("\n") == 1
    assert "wrote" not in captured.out
    return captured.err


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("shared", "format"), [(False, "medusa"), (True, "medusa-shared"), (False, "vllm"), (True, "vllm")]
)
def test_an_export_is_the_source_bit_by_bit(tmp_path, target, shared, format, num_layers):
    head = make_head(num_layers=num_layers, shared=shared, base=str(target))
    save_head(head, tmp_path / "source")
    assert main([str(tmp_path / "source"), "--format", format, "--output", str(tmp_path / "out")]) == 0
    loaded = load_head(tmp_path / "out")
    assert loaded.config == head.config
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    if format == "vllm":
        assert files == {"README.md", "config.json", "model.safetensors", "replay.json"}
    else:
        assert files == {"README.md", "config.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt", "replay.json"}
        torch_file = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
        tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
        assert torch_file.keys() == tensors.keys()
        assert all(torch.equal(torch_file[name], tensors[name]) for name in tensors)


@pytest.fixture
def target(tmp_path):
    """A target whose lm_head is tied to its embedding, in Hugging Face layout."""
    sizes = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_shared_heads_carry_the_targets_lm_head_to_vllm(tmp_path, target, capsys):
    save_head(make_head(shared=True, base=""), tmp_path / "source")
    arguments = [tmp_path / "source", "--format", "vllm", "--output", tmp_path / "out"]
    assert "--base-model" in error_of(capsys, *arguments)
    assert "neither a folder here nor OWNER/NAME" in error_of(capsys, *arguments, "--base-model", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in error_of(capsys, *arguments, "--base-model", tmp_path / "empty")
    assert main([*map(str, arguments), "--base-model", str(target), "--dtype", "bfloat16"]) == 0
    expected = load_file(target / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_heads.0.weight"], expected)
    assert "export with `--format medusa-shared`" in card_of(tmp_path / "out")[1]


def test_dtype_and_base_model_are_written(run, tmp_path):
    arguments = [
        "--format",
        "medusa",
        "--output",
        str(tmp_path / "out"),
        "--dtype",
        "bfloat16",
        "--base-model",
        "you/target",
    ]
    assert main([str(run), *arguments]) == 0
    loaded = load_head(tmp_path / "out")
    assert loaded.config.base_model_name_or_path == "you/target"
    assert torch.equal(loaded.heads[1].lm_head.weight, load_head(run).heads[1].lm_head.weight.bfloat16())
    assert "before the weights were cast" in card_of(tmp_path / "out")[1]


@pytest.mark.parametrize("source", ["", "head", "checkpoints/step-000200", "checkpoints/step-000200/head"])
def test_runs_checkpoints_and_heads_are_sources(run, tmp_path, source):
    assert main([str(run / source), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    assert main([str(tmp_path / "out"), "--format", "vllm", "--output", str(tmp_path / "again")]) == 0
    assert load_head(tmp_path / "again").config == load_head(run).config


def test_the_card_tells_what_was_measured(run, tmp_path):
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "first"), "--license", "apache-2.0"]) == 0
    front, text = card_of(tmp_path / "first")
    assert front["base_model"] == "some/target"
    assert front["library_name"] == "headstart"
    assert front["license"] == "apache-2.0"
    assert {"medusa", "speculative-decoding"} <= set(front["tags"])
    for figure in (
        "| acceptance length | 1.57 |",
        "| accepted at position 2 | 0.123 |",
        "4,321 steps",
        "2 cores of a test",
    ):
        assert figure in text
    assert "| first | chain of 2 | 0 | 3 | 1.61 | 123 | 1.37 | yes |" in text
    assert "`headstart bench --head first`" in text
    assert "lr: 0.0012" in text
    assert "/home/someone" not in text
    assert str(tmp_path) not in text
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    ast.parse(code)
    assert '"model": "first", "num_speculative_tokens": 2, "tree": "static"' in code
    [command] = re.findall(r"^headstart (generate .*)$", text, flags=re.MULTILINE)
    parsed = build_parser().parse_args(shlex.split(command))
    assert (parsed.model, parsed.head, parsed.tree, parsed.compare) == ("some/target", "first", "static", True)
    assert (tmp_path / "first" / "tree.json").read_bytes() == (run / "tree.json").read_bytes()
    assert "builds 5 heads whatever the config says: these are 2" in text


def test_a_checkpoint_tells_the_figures_of_its_own_step(run, tmp_path):
    assert main([str(run / "checkpoints/step-000200"), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    _, text = card_of(tmp_path / "out")
    assert "training step 200" in text
    assert "| acceptance length | 1.22 |" in text
    assert "1.57" not in text
    assert "Speed: no benchmark was found." in text
    assert not (tmp_path / "out" / "tree.json").exists()


def test_figures_that_are_absent_are_said_to_be_absent(tmp_path):
    save_head(make_head(base="/models/mine"), tmp_path / "source")
    assert main([str(tmp_path / "source"), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    front, text = card_of(tmp_path / "out")
    assert "Acceptance: no measurement was found." in text
    assert "Speed: no benchmark was found." in text
    assert "No recipe was found." in text
    assert "base_model" not in front  # a folder of this machine is no model of the Hub
    assert "/models" not in text
    assert '"tree": "chain"' in text


@pytest.mark.parametrize(("num_layers", "said"), [(1, "yes, through"), (2, "no: it takes one residual block")])
def test_the_card_says_which_readers_take_shared_heads(tmp_path, num_layers, said):
    save_head(make_head(num_layers=num_layers, shared=True), tmp_path / "source")
    assert main([str(tmp_path / "source"), "--format", "medusa-shared", "--output", str(tmp_path / "out")]) == 0
    [row] = [
        line for line in card_of(tmp_path / "out")[1].splitlines() if line.startswith("| text-generation-inference")
    ]
    assert said in row


def test_formats_that_would_lose_something_are_refused(tmp_path, capsys):
    for shared, format, right in ((False, "medusa-shared", "'medusa'"), (True, "medusa", "'medusa-shared'")):
        source = tmp_path / f"source-{shared}"
        save_head(make_head(shared=shared), source)
        assert f"use {right}" in error_of(capsys, source, "--format", format, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("license", ["Apache 2.0", "MIT", "mit license", "", "-mit", "apache_2"])
def test_what_is_no_licence_id_is_refused_before_anything_else(tmp_path, capsys, license):
    words = ["--format", "medusa", "--output", tmp_path / "out", "--push-to-hub", "me/it", f"--license={license}"]
    said = error_of(capsys, tmp_path / "nowhere", *words)
    assert f"--license {license!r} is not a licence id: expected one like apache-2.0" in said
    assert "https://huggingface.co/docs/hub/repositories-licenses" in said


def test_a_folder_that_holds_something_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "already holds mine.txt" in error_of(capsys, run, "--format", "medusa", "--output", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_broken_sources_are_named(run, tmp_path, capsys, monkeypatch):
    arguments = ["--format", "medusa", "--output", tmp_path / "out"]
    assert "holds no head" in error_of(capsys, tmp_path, *arguments)

    def no_network(repo_id, name, revision, local_files_only):
        raise OSError("the network is down")

    monkeypatch.setattr(checkpoint, "hf_hub_download", no_network)
    assert "no head at 'nobody/nothing'" in error_of(capsys, "nobody/nothing", *arguments)
    (run / "benchmark.json").write_text("{")
    assert "benchmark.json cannot be read" in error_of(capsys, run, *arguments)
    (run / "benchmark.json").unlink()
    (run / "tree.json").write_text("{}")
    assert "tree.json is not a tree file" in error_of(capsys, run, *arguments)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + "{\n")
    assert "metrics.jsonl, line 5," in error_of(capsys, run / "checkpoints/step-000200", *arguments)
    weights = run / "head" / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "medusa_lm_head.safetensors cannot be read; it is cut short" in error_of(capsys, run, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_values_that_are_not_finite_are_refused(tmp_path, capsys):
    head = make_head()
    with torch.no_grad():
        head.heads[1].blocks[0].linear.weight[0, 0] = 1e6
    save_head(head, tmp_path / "source")
    arguments = [tmp_path / "source", "--format", "medusa", "--output", tmp_path / "out"]
    name = "heads.1.blocks.0.linear.weight holds values that are not finite in float16"
    assert name in error_of(capsys, *arguments, "--dtype", "float16")
    assert main([*map(str, arguments), "--dtype", "bfloat16"]) == 0


def test_a_full_disk_leaves_no_half_export(run, tmp_path, capsys, monkeypatch):
    def fill(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fill)
    said = error_of(capsys, run, "--format", "medusa", "--output", tmp_path / "out")
    assert "No space left on device" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_an_unwritable_output_is_named(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert f"cannot write {tmp_path}/file/out" in error_of(
        capsys, run, "--format", "medusa", "--output", tmp_path / "file/out"
    )


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_a_file_that_reads_back_differently_is_no_export(run, tmp_path, capsys, monkeypatch, name):
    """One bit of one of the two weight files flips on the way to the disk."""
    write = checkpoint.write_head

    def write_badly(head, folder, *args, **kwargs):
        write(head, folder, *args, **kwargs)
        path = folder / name
        tensors = load_file(path) if name.endswith("safetensors") else torch.load(path, weights_only=True)
        tensors["1.0.linear.bias"].view(torch.int32)[3] ^= 1
        save_file(tensors, path) if name.endswith("safetensors") else torch.save(tensors, path)

    monkeypatch.setattr(export, "write_head", write_badly)
    said = error_of(capsys, run, "--format", "medusa", "--output", tmp_path / "out")
    assert f"{name}: 1.0.linear.bias read back differs" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_read_back_compares_config_and_logits(tmp_path):
    head = make_head()
    save_head(head, tmp_path / "out", torch_file=True)
    assert compare_with_source(tmp_path / "out", head, "medusa") == 12
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "other/target"}))
    with pytest.raises(ValueError, match="other/target"):
        compare_with_source(tmp_path / "out", head, "medusa")


def test_help_teaches_with_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "heads.export runs/first --format medusa --output exports/first-medusa" in said
    for option in ("--format", "--output", "--push-to-hub", "--private", "--dtype", "--base-model", "--license"):
        assert option in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--format", "gguf", "--output", "y"], "invalid choice: 'gguf'"),
        (["x", "--format", "medusa"], "--output"),
        (["x", "--output", "y"], "--format"),
        (["x", "--format", "medusa", "--output", "y", "--private"], "--private belongs to --push-to-hub"),
        (["x", "--format", "medusa", "--output", "y", "--dytpe", "float16"], "--dytpe"),
    ],
)
def test_usage_errors_name_the_option(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_warned_of_is_a_line_without_a_place_in_our_code(tmp_path, monkeypatch):
    source = tmp_path / "source"
    save_head(Medusa(MedusaConfig(16, 66, 2)), source)
    (source / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    lines = []

    def show(message, category, *where, **_):
        lines.append(warnings.formatwarning(message, category, *where[:2]))

    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        assert main([str(source), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    assert f'note: {source}: config.json says "medusa_num_heads": 5; by the tensors it is 2\n' in lines
    assert warnings.formatwarning is before


def test_a_card_has_no_other_heads_speed(run, tmp_path):
    """From a benchmark of several heads the card takes the head's own rows and those of plain decoding."""
    bench = json.loads((run / "benchmark.json").read_text())
    (own,) = bench["rows"]
    bench["rows"] = [own | {"head": "none", "speedup": 1.0}, own | {"head": str(run / "export")}]
    bench["rows"].append(own | {"head": str(tmp_path / "better"), "speedup": 7.77})
    (run / "benchmark.json").write_text(json.dumps(bench))
    found = find_measurements(run / "head").benchmark["rows"]
    assert [(row["head"], row["speedup"]) for row in found] == [("none", 1.0), ("first", 1.37)]
    shutil.copytree(run, tmp_path / "moved")
    assert find_measurements(tmp_path / "moved" / "head").benchmark is None
