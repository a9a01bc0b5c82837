"""heads.export verify: a fresh export of every family passes, and any later change of its files or its target is named.

The card and its figures: test_verify_figures.py."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig, ResBlock
from headstart.hub_export import verify
from headstart.hub_export.export import main
from headstart.hub_export.replay import CONTEXT, draw, read_target_inputs
from headstart.hub_export.replay_file import read_replay
from headstart.tests.hub_export.small_exports import FAMILIES, failed


def test_a_fresh_export_is_verified_in_a_process_of_its_own(exported, tiny_target, capsys):
    folder = exported("medusa")
    capsys.readouterr()
    assert main(["verify", str(folder), "--model", str(tiny_target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert "acceptance at temperature 0.8" in lines[-2]
    assert lines[-1].endswith("what was checked is what was written")


@pytest.mark.parametrize("format", FAMILIES)
def test_every_family_is_verified(exported, check, format):
    found = check(exported(format))
    assert {state for state, _ in found.values()} == {verify.OK}
    assert "over 4 prompts" in found["acceptance at temperature 0"][1]
    assert "(the same steps)" in found["acceptance at temperature 0.8"][1]


def test_without_the_target_the_rest_is_checked(exported, check):
    found = check(exported("eagle-vllm"), target=None)
    assert [name for name, (state, _) in found.items() if state == verify.SKIPPED] == [
        "outputs, target's features",
        "acceptance at temperature 0",
        "acceptance at temperature 0.8",
    ]
    assert not failed(found)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_one_changed_weight_is_named(copy, check, name):
    path = copy / name
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    tensors["1.0.linear.bias"].view(torch.int16)[3] ^= 1
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    found = check(copy, target=None)
    assert f"{name} changed" in found["files"][1]
    assert failed(found) == ({"files", "tensors"} if path.suffix == ".safetensors" else {"files"})
    if path.suffix == ".safetensors":
        assert found["tensors"][1].startswith("heads.1.blocks.0.linear.bias is not what was written (1 of 6")


def test_other_maths_on_the_same_bits_is_seen_in_the_outputs(copy, check, monkeypatch):
    monkeypatch.setattr(ResBlock, "forward", lambda self, x: x + torch.nn.functional.gelu(self.linear(x)))
    found = check(copy, target=None)
    assert failed(found) == {"outputs, drawn inputs"}
    assert "over 2 depths, allowed 0.001" in found["outputs, drawn inputs"][1]


@pytest.mark.parametrize(
    ("format", "key", "value", "names"),
    [
        ("medusa", "base_model_name_or_path", "other/target", {"config.json", "files"}),
        (
            "mlp-speculator",
            "scale_input",
            False,
            {"config.json", "files", "outputs, drawn inputs", "outputs, target's features"},
        ),
        ("eagle3", "rope_theta", 500.0, {"config.json", "files"}),
    ],
)
def test_a_changed_key_of_the_config_is_named(exported, tmp_path, check, format, key, value, names):
    shutil.copytree(exported(format), tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    assert config[key] != value
    path.write_text(json.dumps(config | {key: value}))
    found = check(tmp_path / "copy")
    assert found["config.json"][1] == f"{key} is {value!r}, {config[key]!r} was written (1 key(s) differ)"
    assert names <= failed(found)


def test_another_target_is_told_by_its_features(exported, check, tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "other")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_target)).save_pretrained(tmp_path / "other")
    found = check(exported("medusa"), tmp_path / "other")
    assert "outputs, target's features" in failed(found)
    assert "it is another target, or another revision of it" in found["outputs, target's features"][1]
    assert found["outputs, drawn inputs"][0] == verify.OK


def test_a_target_of_another_size_is_refused_in_words(exported, check, tiny_target, tmp_path):
    config = AutoConfig.from_pretrained(tiny_target)
    config.hidden_size = 16
    shutil.copytree(tiny_target, tmp_path / "narrow")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "narrow")
    found = check(exported("medusa"), tmp_path / "narrow")
    assert "hidden size 32, the target has 16" in found["acceptance at temperature 0"][1]
    assert "outputs, target's features" in failed(found)


def test_missing_files_are_named(copy, check):
    (copy / "medusa_lm_head.pt").unlink()
    (copy / "README.md").unlink()
    found = check(copy, target=None)
    assert failed(found) == {"files", "card"}
    assert found["files"][1] == "medusa_lm_head.pt missing"


@pytest.mark.parametrize(
    "name",
    [
        "tree.json",
        "model.safetensors",
        "pytorch_model.bin.index.json",
        "more.safetensors",
        "head/medusa_lm_head.pt",
        "adapter/adapter_config.json",
        "head/adapter/adapter_model.safetensors",
    ],
)
def test_a_file_that_was_not_exported_and_would_be_read_is_named(copy, name):
    (copy / name).parent.mkdir(exist_ok=True, parents=True)
    (copy / name).write_text("{}")
    found = verify._files(copy, read_replay(copy))
    assert (found.state, found.evidence) == (verify.FAILED, f"{name} was not exported and would be read: move it away")


def test_other_files_may_lie_there(copy, check):
    for name in ("notes.txt", "results.json", "old/tree.json", "old/model.safetensors", "adapter/notes.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
    assert not failed(check(copy, target=None))


def test_weights_that_do_not_load_are_a_verdict_not_a_crash(copy, check):
    path = copy / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    found = check(copy, target=None)
    assert failed(found) == {"files", "tensors", "outputs, drawn inputs"}
    assert "cut short" in found["tensors"][1]


def test_a_reason_is_told_once(copy, check):
    path = copy / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    found = check(copy)
    assert len(failed(found)) == 6
    assert [name for name, (_, evidence) in found.items() if "cut short" in evidence] == ["tensors"]
    assert [name for name, (_, evidence) in found.items() if evidence == "as tensors"] == [
        "outputs, drawn inputs",
        "outputs, target's features",
        "acceptance at temperature 0",
        "acceptance at temperature 0.8",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone"], "there is no folder gone"),
        (["copy", "--model", "x", "--prompts", "gone.jsonl"], "no prompt file gone.jsonl"),
        (["copy", "--model", "./nowhere"], "there is no model folder ./nowhere"),
        (["empty"], "holds no replay.json"),
    ],
)
def test_what_cannot_be_checked_is_one_line(copy, tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("bits", "distance", "error", "state"),
    [
        ((32, 32), 5e-4, 5e-4, verify.OK),
        ((32, 32), 5e-4, 0.1, verify.FAILED),
        ((32, 32), 0.05, 5e-4, verify.FAILED),
        ((32, 16), 0.05, 0.1, verify.OK),
        ((16, 32), 0.05, 0.1, verify.OK),
        ((16, 16), 0.5, 0.1, verify.FAILED),
        ((16, 16), 0.05, 0.5, verify.FAILED),
    ],
)
def test_a_target_of_16_bits_on_either_side_is_given_more_room(bits, distance, error, state):
    found = {"bits": bits[0], "distance": distance, "errors": [0.0, error]}
    assert verify._on_target(found, {"target": {"bits": bits[1], "name": "its"}}, "a").state == state


def test_drawn_numbers_never_change():
    """Existing files hold outputs that were computed from them."""
    expected = [-0.9087932705879211, -1.478516697883606, -1.1610221862792969, -1.129610300064087]
    assert draw((2, 2), 1).flatten().tolist() == pytest.approx(expected)
    many = draw((50_000,), 4)
    assert abs(float(many.mean())) < 0.02
    assert float(many.std()) == pytest.approx(1, abs=0.01)


TOKENS = [list(range(3, 51)), [7, 8], list(range(90, 80, -1))]  # longer than CONTEXT, too short, shorter


@torch.no_grad()
@pytest.mark.parametrize("kind", ["final", "streams"])
def test_features_rows_and_tokens_of_a_target(tiny_target, tmp_path, kind):
    target = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    if kind == "final":
        head = Medusa(MedusaConfig(32, 320, 2, 1, True))
    else:
        head = Eagle3(Eagle3Config.for_target(target.config, aux_layer_ids=(0, 1, 2), num_speculative_tokens=2))
    inputs, bits = read_target_inputs(head, tiny_target, tmp_path, TOKENS, device="cpu")
    assert bits == 32
    depths, row, counted = inputs.tokens.shape[-1], 0, []
    for number, ids in enumerate((TOKENS[0], TOKENS[2])):
        states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for place in range(max(0, len(ids) - depths - CONTEXT), len(ids) - depths):
            found = inputs.features[0, row]
            assert inputs.tokens[0, row].tolist() == ids[place + 1 : place + 1 + depths]
            assert (int(inputs.positions[0, row]), int(inputs.documents[0, row])) == (place, number)
            if kind == "streams":
                *found, after = found.split(32)
                assert all(torch.allclose(one, state[0, place], atol=1e-5) for one, state in zip(found, states))
                found = target.model.norm(after)  # transformers gives the last one normed
            assert torch.allclose(found, states[-1][0, place], atol=1e-5)
            row += 1
        counted += [row - 2, row - 1]
    assert row == inputs.features.shape[1]
    assert inputs.rows.tolist() == counted
    assert (inputs.lm_head is None) is (kind == "streams")
