"""heads.export verify: a fresh export of every family is what it says, and whatever is changed in it afterwards is named."""

import json
import shutil
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.checkpoint import save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig, ResBlock
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export import acceptance, export, verify
from headstart.hub_export.acceptance import disagreements, intervals, pool
from headstart.hub_export.export import main
from headstart.hub_export.replay import replay_process
from headstart.hub_export.replay.replay import draw
from headstart.hub_export.replay.replay_file import read_replay

H, V = 32, 320
PROMPTS = ["def read(path):", "class Head(nn.Module):", "import torch", "return x + self.linear(x)"]


def medusa(target, shared=False):
    """Heads on the target's own lm_head, so that some drafts are accepted; their blocks are not the identity."""
    head = Medusa(MedusaConfig(H, V, 2, 1, shared, "some/target"))
    for one in head.heads:
        torch.nn.init.uniform_(one.blocks[0].linear.bias, -1, 1)
    if not shared:
        head.initialize_from_target(target.get_output_embeddings().weight)
    return head


def deep(kind, config, target, **changes):
    head = kind(config.for_target(target.config, base_model_name_or_path="some/target", **changes))
    head.take_embedding(target.get_input_embeddings().weight)
    return head


FAMILIES = {
    "medusa": medusa,
    "medusa-shared": partial(medusa, shared=True),
    "mlp-speculator": lambda target: MLPSpeculator(
        MLPSpeculatorConfig(H, V, 16, base_model_name_or_path="some/target")
    ),
    "eagle-vllm": lambda target: deep(Eagle, EagleConfig, target),
    "eagle3": lambda target: deep(Eagle3, Eagle3Config, target, aux_layer_ids=(0, 1, 2), draft_vocab_size=200),
}


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory):
    """make(format) -> an export of a head of that family, measured on the tiny target with short outputs; made once each."""
    folder = tmp_path_factory.mktemp("exports")
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def make(format):
        if not (folder / format).is_dir():
            torch.manual_seed(3)
            head = FAMILIES[format](target)
            if format == "eagle3":
                head.d2t.copy_(torch.arange(200) // 2)
                head.t2d.zero_()[head.draft_token_ids] = True
            save_head(head, folder / f"{format}-source")
            arguments = [
                folder / f"{format}-source",
                "--format",
                format,
                "--output",
                folder / format,
                "--dtype",
                "bfloat16",
            ]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(export, "measure_acceptance", partial(acceptance.measure, max_tokens=12))
                given = ["--measure", str(tiny_target), "--prompts", str(prompts)]
                assert main([*map(str, arguments), *given]) == 0
        return folder / format

    return make


@pytest.fixture
def check(monkeypatch, tiny_target, tmp_path):
    """verify() in this process, which is faster: {name of a check: (state, evidence)}."""

    def answer(request):
        files = tmp_path / "request.json", tmp_path / "reply.json"
        files[0].write_text(json.dumps(request))
        replay_process.main(files)
        return json.loads(files[1].read_text())

    def run(export, target=tiny_target, **options):
        found = verify.verify(export, target and str(target), **options)
        return {one.name: (one.state, one.evidence) for one in found}

    monkeypatch.setattr(verify, "_in_clean_process", answer)
    monkeypatch.setattr(replay_process, "choose_threads_for", lambda *_: None)
    return run


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the Medusa export, to be changed."""
    shutil.copytree(exported("medusa"), tmp_path / "copy")
    return tmp_path / "copy"


def failed(found):
    return {name for name, (state, _) in found.items() if state == verify.FAILED}


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


@pytest.mark.parametrize(("before", "where"), [("| acceptance length | ", "its table"), ("value: ", "its model-index")])
def test_a_changed_figure_of_the_card_is_named(copy, check, before, where):
    card = (copy / "README.md").read_text()
    start = card.index(before) + len(before)
    (copy / "README.md").write_text(card[:start] + "9" + card[start:])
    found = check(copy, target=None)
    assert failed(found) == {"card"}
    assert found["card"][1].startswith(f"{where} says 9")
    assert "for acceptance length at temperature 0, measured was " in found["card"][1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda metric: metric.update(value=None),
            "the card's value of acceptance length at temperature 0 is no number (None)",
        ),
        (
            lambda metric: metric["args"].update(temperature="warm"),
            "the card's temperature of acceptance length is no number ('warm')",
        ),
        (
            lambda metric: metric["args"].update(temperature=None),
            "the card's temperature of acceptance length is no number (None)",
        ),
        (lambda metric: metric.update(value=10**400), "temperature 0 is no number that fits (1000"),
        (lambda metric: metric.update(args="mine"), "its model-index says nothing for acceptance length"),
        (lambda metric: metric.clear(), "its model-index says nothing for acceptance length"),
    ],
)
def test_a_model_index_edited_by_hand_is_a_verdict(copy, check, change, said):
    _, front, text = (copy / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    change(front["model-index"][0]["results"][0]["metrics"][0])
    (copy / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n{text}")
    found = check(copy, target=None)
    assert failed(found) == {"card"}
    assert said in found["card"][1]


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("model-index: mine", "the card's model-index holds 'mine' where lists of mappings are expected"),
        ("model-index: [{results: [null]}]", "the card's model-index holds '[None]' where"),
        ("[license, mit]", "the front matter of README.md is no mapping"),
        ("a: [", "the front matter of README.md is no YAML"),
        ("a: 2026-13-45", "the front matter of README.md is no YAML"),
    ],
)
def test_a_front_matter_that_cannot_be_read_is_a_verdict(copy, check, front, said):
    _, _, text = (copy / "README.md").read_text().split("---\n", 2)
    (copy / "README.md").write_text(f"---\n{front}\n---\n{text}")
    found = check(copy, target=None)
    assert failed(found) == {"card"}
    assert said in found["card"][1]


def test_text_of_the_card_may_be_changed(copy, check):
    card = (copy / "README.md").read_text()
    (copy / "README.md").write_text(card.replace("## Use it", "## A word of mine\n\n| a | b |\n|---|---|\n\n## Use it"))
    (copy / "README.md").write_text((copy / "README.md").read_text() + "\nMore.\n")
    assert not failed(check(copy, target=None))


def test_figures_that_were_made_up_everywhere_are_not_measured_again(copy, check):
    """Card and replay.json agree on counts that the engine does not find."""
    stored = json.loads((copy / "replay.json").read_text())
    card = (copy / "README.md").read_text()
    figure = stored["acceptance"][0]
    told = [figure["acceptance_length"], *figure["per_position"]]
    figure["by_request"] = [[steps, steps, steps] for steps, *_ in figure["by_request"]]
    figure |= pool(figure["by_request"])
    stored["acceptance"] = [figure]
    (copy / "replay.json").write_text(json.dumps(stored))
    from headstart.hub_export.card.acceptance_table import acceptance_table

    body = card[card.index("# copy" if "# copy" in card else "# medusa") :]
    start, end = body.index("Acceptance, measured"), body.index("Speed:")
    (copy / "README.md").write_text(body[:start] + acceptance_table([figure], [None]) + "\n\n" + body[end:])
    found = check(copy)
    assert told[0] < 2.5
    assert {"card", "acceptance at temperature 0"} <= failed(found)  # the model-index is gone with the front matter
    assert "acceptance length 3.000 is said" in found["acceptance at temperature 0"][1]


def test_figures_that_are_not_those_of_their_counts_are_named(copy, check):
    stored = json.loads((copy / "replay.json").read_text())
    stored["acceptance"][1]["acceptance_length"] += 0.5
    (copy / "replay.json").write_text(json.dumps(stored))
    found = check(copy, target=None)
    assert failed(found) == {"figures", "card"}
    assert found["figures"][1] == "those at temperature 0.8 are not those of their own counts"


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
    assert main(["verify", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_cannot_be_measured_is_refused_before_anything_is_written(tiny_target, tmp_path, capsys):
    save_head(Medusa(MedusaConfig(16, V, 2)), tmp_path / "source")
    (tmp_path / "empty.jsonl").write_text("")
    arguments = [str(tmp_path / "source"), "--format", "medusa", "--output", str(tmp_path / "out"), "--measure"]
    for more, said in (
        ([], "give --measure TARGET"),
        ([str(tmp_path / "source")], "holds a head, not a target"),
        ([str(tiny_target)], "hidden size 16, the target has 32"),
    ):
        assert main([*arguments, *more]) == 1
        assert said in capsys.readouterr().err
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "fits")
    more = [str(tiny_target), "--prompts", str(tmp_path / "empty.jsonl")]
    assert main([str(tmp_path / "fits"), *arguments[1:], *more]) == 1
    assert "empty.jsonl holds 0 prompts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_runs_figure_is_measured_again_on_prompts_that_are_named(tiny_target, check, tmp_path):
    """The trainer's figure comes along, its prompts do not."""
    run, prompts = tmp_path / "run", tmp_path / "heldout.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    save_head(medusa(AutoModelForCausalLM.from_pretrained(tiny_target)), run / "head")
    ids, _ = acceptance.choose_prompts(prompts, tiny_target)
    [measured] = acceptance.measure(run / "head", tiny_target, ids, temperatures=(0.0,), max_tokens=12)
    kept = {name: measured[name] for name in ("acceptance_length", "per_position", "num_steps")}
    (run / "acceptance.json").write_text(json.dumps(kept | {"source": "engine"}))
    (run / "config.yaml").write_text("eval_prompts: 4\neval_tokens: 12\n")
    for name, changed in (("right", kept), ("wrong", kept | {"acceptance_length": 2.9})):
        (run / "acceptance.json").write_text(json.dumps(changed))
        assert main([str(run), "--format", "medusa", "--output", str(tmp_path / name)]) == 0
    found = check(tmp_path / "right")["acceptance at temperature 0"]
    assert found[0] == verify.SKIPPED
    assert "name them with --prompts" in found[1]
    assert check(tmp_path / "right", prompts=str(prompts))["acceptance at temperature 0"][0] == verify.OK
    found = check(tmp_path / "wrong", prompts=str(prompts))["acceptance at temperature 0"]
    assert found[0] == verify.FAILED
    assert "acceptance length 2.900 is said" in found[1]


def test_intervals_hold_the_pooled_figure_and_grow_narrow_with_more_requests():
    dice = torch.Generator().manual_seed(0)
    counts = [[10, int(torch.randint(2, 9, (), generator=dice)), 1] for _ in range(64)]
    figure = pool(counts)
    assert figure["acceptance_length"] == pytest.approx(1 + sum(one[1] + one[2] for one in counts) / 640)
    widths = [high - low for low, high in (intervals(counts[:8])[0], intervals(counts)[0])]
    assert widths[1] < widths[0] / 2
    assert disagreements(figure, counts) == []
    [said] = disagreements(figure | {"per_position": [figure["per_position"][0], 0.3]}, counts)
    assert said.startswith("position 2 0.300 is said")


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


def test_a_token_more_or_less_at_a_rare_position_is_no_disagreement():
    """Of 800 steps one was accepted so deep, on another machine none: all resampled counts are zero."""
    figure = pool([[50, 20, 1]] + [[50, 20, 0]] * 15)
    assert disagreements(figure, [[50, 20, 0]] * 16) == []
    [said] = disagreements(pool([[50, 20, 1]] * 16), [[50, 20, 0]] * 16)
    assert said.startswith("position 2 0.020 is said")


def test_drawn_numbers_never_change():
    """Files that were written hold what was computed from them."""
    expected = [-0.9087932705879211, -1.478516697883606, -1.1610221862792969, -1.129610300064087]
    assert draw((2, 2), 1).flatten().tolist() == pytest.approx(expected)
    many = draw((50_000,), 4)
    assert abs(float(many.mean())) < 0.02
    assert float(many.std()) == pytest.approx(1, abs=0.01)
