"""The files beside the weights of an export, and its card: figures, drawings, commands, licence."""

import json
import re
import shlex
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from headstart.evaluation.charts import as_file, line_chart
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export.acceptance import acceptance_table, read_card
from headstart.hub_export.export import main
from headstart.hub_export.measurements import find_measurements
from headstart.hub_export.model_card import usage
from headstart.tests.heads.test_eagle import SHAPE

ROOT = Path(__file__).resolve().parents[2]
H, V = SHAPE["hidden_size"], SHAPE["vocab_size"]
BASE = {"base_model_name_or_path": "some/target"}
EAGLE3 = SHAPE | BASE | dict(target_hidden_size=20, draft_vocab_size=11, aux_layer_ids=(1, 3, 5))
HEADS = {
    "medusa": lambda: Medusa(MedusaConfig(H, V, 3, **BASE)),
    "medusa-shared": lambda: Medusa(MedusaConfig(H, V, 3, 1, True, **BASE)),
    "medusa-shared of two blocks": lambda: Medusa(MedusaConfig(H, V, 3, 2, True, **BASE)),
    "vllm": lambda: Medusa(MedusaConfig(H, V, 3, **BASE)),
    "mlp-speculator": lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, 12, scale_input=False, **BASE)),
    "mlp-speculator that scales": lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, 12, **BASE)),
    "eagle-vllm": lambda: Eagle(EagleConfig(**SHAPE, **BASE)),
    "eagle-sglang": lambda: Eagle(EagleConfig(**SHAPE, **BASE)),
    "eagle3": lambda: Eagle3(Eagle3Config(**EAGLE3)),
    "speculators": lambda: Eagle3(Eagle3Config(**EAGLE3)),
    # Heads that engines refuse, or compute differently, in every format.
    "medusa without a target": lambda: Medusa(MedusaConfig(H, V, 3)),
    "mlp-speculator of one tied step": lambda: MLPSpeculator(
        MLPSpeculatorConfig(H, V, 12, 1, scale_input=False, **BASE)
    ),
    "eagle-sglang with biases": lambda: Eagle(EagleConfig(**SHAPE, **BASE, attention_bias=True)),
    "eagle3 of two layers": lambda: Eagle3(Eagle3Config(**EAGLE3 | {"aux_layer_ids": (1, 3)})),
    "eagle3 with biases": lambda: Eagle3(Eagle3Config(**EAGLE3, attention_bias=True)),
    "speculators of two layers": lambda: Eagle3(Eagle3Config(**EAGLE3 | {"aux_layer_ids": (1, 3)})),
}


def export(tmp_path, kind, *more, name="out"):
    """Export a new head of HEADS.  -> its folder"""
    torch.manual_seed(0)
    if not (tmp_path / "source").is_dir():
        save_head(HEADS[kind](), tmp_path / "source")
    format = kind.split(" ")[0]
    arguments = [str(tmp_path / "source"), "--format", format, "--output", str(tmp_path / name), *map(str, more)]
    assert main(arguments) == 0
    return tmp_path / name


@pytest.mark.parametrize(
    ("kind", "servers"),
    [
        ("medusa", {"text-generation-launcher"}),
        ("medusa-shared", {"text-generation-launcher"}),
        ("medusa-shared of two blocks", set()),
        ("vllm", {"vllm"}),
        ("mlp-speculator", {"text-generation-launcher"}),
        ("mlp-speculator that scales", set()),
        ("eagle-vllm", {"vllm"}),
        ("eagle-sglang", {"python"}),
        ("eagle3", {"vllm", "python"}),
        ("speculators", {"vllm"}),
        ("medusa without a target", set()),
        ("mlp-speculator of one tied step", set()),
        ("eagle-sglang with biases", set()),
        ("eagle3 of two layers", set()),
        ("eagle3 with biases", set()),
        ("speculators of two layers", set()),
    ],
)
def test_the_card_gives_a_command_for_every_engine_that_reads_the_files_and_no_other(tmp_path, kind, servers):
    folder = export(tmp_path, kind)
    commands = [
        shlex.split(block.replace("\\\n", " "))
        for block in re.findall(r"```sh\n(.*?)\n```", (folder / "README.md").read_text(), flags=re.DOTALL)
    ]
    named = {words[0]: words for words in commands}
    assert len(named) == len(commands)
    assert named.keys() - {"headstart", "heads.export"} == servers
    head = load_head(folder)
    depth, target = head.num_speculative_tokens, head.config.base_model_name_or_path or "TARGET"
    assert named["heads.export"] == ["heads.export", "verify", "out", "--model", target]
    if "vllm" in servers:
        config = json.loads(named["vllm"][-1])
        assert config.pop("method") in ("medusa", "eagle", "eagle3")
        assert config == {"model": "out", "num_speculative_tokens": depth}
        assert named["vllm"][:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    if "python" in servers:
        options = dict(zip(named["python"][3::2], named["python"][4::2]))
        steps, width, tokens = (
            int(options[f"--speculative-{name}"]) for name in ("num-steps", "eagle-topk", "num-draft-tokens")
        )
        assert steps == depth
        assert steps < tokens <= 1 + width + (steps - 1) * width**2
        assert options["--speculative-algorithm"] == {"eagle3": "EAGLE3"}.get(kind, "EAGLE")
        assert options["--speculative-draft-model-path"] == "out"
    if "text-generation-launcher" in servers:
        assert named["text-generation-launcher"][1:] == ["--model-id", "out", "--speculate", str(depth)]


def test_the_commands_of_a_branch_load_that_branch():
    said = {
        format: usage(HEADS[format](), format, "me/it@a/branch", "some/target", "chain")
        for format in ("medusa", "eagle3")
    }
    assert '"model": "me/it@a/branch"' in said["medusa"]
    assert "--head me/it@a/branch " in said["medusa"]
    assert "heads.export verify me/it@a/branch " in said["medusa"]
    assert "--model-id me/it --revision a/branch " in said["medusa"]
    assert "--speculative-draft-model-path me/it --speculative-draft-model-revision a/branch " in said["eagle3"]
    [config] = re.findall(r"--speculative-config '(.*)'", said["eagle3"])
    assert {"model": "me/it", "revision": "a/branch"}.items() <= json.loads(config).items()


FIGURES = [
    {"temperature": 0.0, "acceptance_length": 1.75, "per_position": [0.5, 0.25], "num_steps": 400, "prompts": "mine"},
    {"temperature": 0.8, "acceptance_length": 1.5, "per_position": [0.4, 0.1], "num_steps": 500, "num_prompts": 9},
]


@pytest.fixture
def run(tmp_path):
    """A run with a training after it, whose last head is an earlier export's, measured at two temperatures."""
    folder = tmp_path / "runs" / "first"
    save_head(HEADS["medusa"](), folder / "head")
    lines = [
        {"step": step, "kind": "train", "loss": 3.0 - step / 10, "head0_loss": 2.0, "head1_loss": 4.0 - step / 20}
        for step in range(1, 9)
    ]
    lines += [
        {"step": step, "kind": "acceptance", "acceptance_length": 1 + step / 10, "per_position": [step / 10]}
        for step in (4, 8)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_head(HEADS["medusa"](), folder / "checkpoints" / "step-000004" / "head")
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"data": "some/conversations:train_sft", "target": "/secret/target"})
    )
    rates = [[0.5, 0.2], [0.3, 0.1]]
    acceptance = {"acceptance_length": 1.8, "per_position": [0.6, 0.2], "num_steps": 300, "rates": rates}
    (folder / "acceptance.json").write_text(json.dumps(acceptance))
    (folder / "tree.json").write_text(
        json.dumps(
            {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0], "rates": rates, "expected_acceptance_length": 1.85}
        )
    )
    return folder


def drawings(folder):
    """{name: the texts of a drawing}, each read as XML and shown by the card."""
    card, found = (folder / "README.md").read_text(), {}
    for path in sorted((folder / "plots").iterdir()):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert f"]({path.relative_to(folder).as_posix()})" in card
        found[path.name] = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert card.count("](plots/") == len(found)
    return found


def test_drawings_show_training_acceptance_and_tree(run, tmp_path):
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    found = drawings(tmp_path / "out")
    assert set(found) == {"acceptance.svg", "loss.svg", "rates.svg", "training.svg", "tree.svg"}
    assert {"head 0", "head 1"} <= set(found["loss.svg"])
    assert {"depth 2", ".50", ".10"} <= set(found["rates.svg"])
    assert "depth 2" in found["tree.svg"]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "static, 4 nodes, its root among them. By the measured rates it promises 1.85 tokens per step." in text
    assert "datasets:\n- some/conversations" in text
    assert "/secret" not in text + (tmp_path / "out" / "replay.json").read_text()


@pytest.mark.parametrize(("start_from", "named"), [("some/head@main", True), ("", False), ("/secret/head", False)])
def test_card_names_the_published_head_that_the_training_went_on_with(run, tmp_path, start_from, named):
    (run / "config.yaml").write_text(yaml.safe_dump({"data": "stdlib", "start_from": start_from}))
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    said = "The training went on with the head `some/head@main`, whose licence may have a say in this one."
    assert (said in (tmp_path / "out" / "README.md").read_text()) == named


def test_no_absolute_path_reaches_the_export(run, tmp_path):
    recipe = {"data": ["some/conversations", "/secret/my secret/a.jsonl"], "target": "/secret/target", "lr": 0.5}
    recipe |= {
        "more": {"files": ["~/secret/b.jsonl", "file:///secret/c"], "note": "from https://a.b/c or (/secret/d), 3 / 4"}
    }
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    words = [
        "headstart bench --head=/secret/runs/e --models a/b,/a(secret)/f --tree '/my secret/g.json'",
        r"--out C:\secret\h",
    ]
    bench = {
        "command": " ".join(words),
        "places": ["/secret/i", 2],
        "rows": [{"head": "/secret/j/head", "draft": "/secret/k"}],
    }
    (run / "benchmark.json").write_text(json.dumps(bench))
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    stored = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert "secret" not in card + json.dumps(stored)
    note = "from https://a.b/c or (d), 3 / 4"
    more = {"files": ["b.jsonl", "c"], "note": note}
    assert stored["recipe"] == {"data": ["some/conversations", "a.jsonl"], "lr": 0.5, "more": more}
    assert note in card
    assert "`headstart bench --head=e --models a/b,f --tree 'g.json' --out h`" in card
    assert stored["benchmark"]["rows"] == [{"head": "j", "draft": "k"}]
    assert stored["benchmark"]["places"] == ["i", 2]


def test_every_data_set_of_the_hub_is_named(run, tmp_path):
    (run / "config.yaml").write_text(
        yaml.safe_dump({"data": "some/conversations:train_sft:0.7, other/texts:0.3,a.jsonl"})
    )
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    assert metadata_load(tmp_path / "out" / "README.md")["datasets"] == ["some/conversations", "other/texts"]


def test_tree_and_speed_of_the_best_head_are_not_those_of_the_final_one(run, tmp_path, capsys):
    best = HEADS["medusa"]()
    torch.nn.init.normal_(next(best.parameters()))
    save_head(best, run / "best")
    (run / "best" / "acceptance.json").write_text(json.dumps({"step": 4, "acceptance_length": 1.9, "per_position": []}))

    def found(*heads):
        """Speeds in the card of head/, and of best/, if these heads were measured as 1.0, 1.1 and so on."""
        rows = [{"head": str(head), "speedup": 1 + i / 10} for i, head in enumerate(heads)]
        bench = {"hardware": "a test's cores", "rows": [{"head": "none", "speedup": 1.0}, *rows]}
        (run / "benchmark.json").write_text(json.dumps(bench))
        measured = [find_measurements(run / name).benchmark for name in ("head", "best")]
        return [one and [row["speedup"] for row in one["rows"] if row["head"] != "none"] for one in measured]

    assert found(run / "best", run / "head", run / "checkpoints" / "step-000004", run / "moved") == [[1.1], [1.0, 1.3]]
    assert found("/elsewhere/first") == [None, [1.0]]
    assert found("/elsewhere/first/head") == [[1.0], None]
    assert found(run) == [None, [1.0]]
    for source, kept in ((run / "head", False), (run, True)):
        output = tmp_path / f"out-{kept}"
        assert main([str(source), "--format", "medusa", "--output", str(output)]) == 0
        said = f"note: left out {run / 'tree.json'} and {run / 'benchmark.json'}: measured on other weights of that run"
        assert (said in capsys.readouterr().out) != kept
        assert (output / "tree.json").exists() == kept
        assert ("a test's cores" in (output / "README.md").read_text()) == kept
    shutil.copyfile(run / "best" / "medusa_lm_head.safetensors", run / "head" / "medusa_lm_head.safetensors")
    assert found(run) == [[1.0], [1.0]]  # the last measurement was the best
    assert find_measurements(run / "head").tree == run / "tree.json"


def test_a_checkpoint_is_drawn_up_to_its_own_step(run, tmp_path):
    source = run / "checkpoints" / "step-000004"
    assert main([str(source), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    found = drawings(tmp_path / "out")
    assert set(found) == {
        "acceptance.svg",
        "loss.svg",
    }  # one measurement is no curve; rates and tree are the final head's
    assert "4" in found["loss.svg"]
    assert "8" not in found["loss.svg"]


def test_figures_recipe_and_drawings_come_along_to_another_format(run, tmp_path):
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "one")]) == 0
    assert main([str(tmp_path / "one"), "--format", "vllm", "--output", str(tmp_path / "two")]) == 0
    assert main([str(tmp_path / "two"), "--format", "medusa", "--output", str(tmp_path / "one again")]) == 0
    for name in ("medusa_lm_head.safetensors", "config.json", "tree.json"):
        assert (tmp_path / "one again" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    cards = [(tmp_path / name / "README.md").read_text() for name in ("one", "two", "one again")]
    assert all("without them. Exported again from `one`.\n" in card for card in cards[1:])
    renamed = cards[0]
    for place in ("name: {}", "# {}", '"{}"'):
        renamed = renamed.replace(place.format("one"), place.format("one again"))
    for place in ("--head {}", "verify {}", "--model-id {}"):
        renamed = renamed.replace(place.format("one"), place.format("'one again'"))
    assert cards[2].replace(" Exported again from `one`.", "") == renamed
    assert "| acceptance length | 1.8 |" in cards[1]
    assert all("trained and exported with Headstart" in card for card in cards)
    assert drawings(tmp_path / "two") == drawings(tmp_path / "one")


def test_figures_in_a_file_of_another_version_are_not_guessed_at(run, tmp_path):
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "one")]) == 0
    stored = json.loads((tmp_path / "one" / "replay.json").read_text())
    (tmp_path / "one" / "replay.json").write_text(json.dumps(stored | {"version": 2}))
    assert main([str(tmp_path / "one"), "--format", "vllm", "--output", str(tmp_path / "two")]) == 0
    assert "Acceptance: no measurement was found." in (tmp_path / "two" / "README.md").read_text()


def test_the_hub_reads_the_figures(run, tmp_path):
    assert main([str(run), "--format", "medusa", "--output", str(tmp_path / "out"), "--license", "mit"]) == 0
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.library_name, data.license) == ("some/target", "headstart", "mit")
    told = {one.metric_type: one.metric_value for one in data.eval_results}
    assert told == {"acceptance_length": 1.8, "accepted_at_position_1": 0.6, "accepted_at_position_2": 0.2}
    assert {one.metric_args["temperature"] for one in data.eval_results} == {0.0}
    assert metadata_load(tmp_path / "out" / "README.md")["metrics"] == ["acceptance_length"]


def test_a_table_of_several_temperatures_reads_back():
    table = acceptance_table(FIGURES, [(1.7, 1.8), None])
    assert "| accepted at position 2 | 0.25 | 0.1 |" in table
    assert "| 99 % interval | 1.7 to 1.8 | - |" in table
    assert "400 steps at temperature 0 and 500 steps at temperature 0.8" in table
    found, index = read_card(
        f"---\nlicense: mit\n---\n# a\n\n| x | y |\n|---|---|\n\n{table}\n\n| | |\n|---|---|\n| a | 1 |\n"
    )
    assert index == {}
    assert found == {
        ("0", "acceptance length"): "1.75",
        ("0.8", "acceptance length"): "1.5",
        ("0", "accepted at position 1"): "0.5",
        ("0.8", "accepted at position 1"): "0.4",
        ("0", "accepted at position 2"): "0.25",
        ("0.8", "accepted at position 2"): "0.1",
    }
    with pytest.raises(ValueError, match=r"front matter of README\.md is not YAML"):
        read_card("---\na: [\n---\n# a\n")


def test_tokenizer_and_licence_of_the_target_are_told(tmp_path, tiny_target):
    card = "---\nlicense: llama3.1\n---\n# A target\n"
    target = tmp_path / "target"
    target.mkdir()
    for path in tiny_target.glob("*"):
        (target / path.name).write_bytes(path.read_bytes())
    (target / "README.md").write_text(card)
    folder = export(tmp_path, "medusa", "--base-model", target, "--license", "apache-2.0")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (target / name).read_bytes()
    assert not (folder / "generation_config.json").exists()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    text = (folder / "README.md").read_text()
    assert "The head is published under `apache-2.0`; its text is in `LICENSE`." in text
    assert "The licence of `target` is `llama3.1`, as its card says." in text


def test_a_licence_whose_text_is_not_at_hand_is_named_only(tmp_path, capsys):
    folder = export(tmp_path, "medusa", "--license", "mit")
    assert not (folder / "LICENSE").exists()
    text = (folder / "README.md").read_text()
    assert "license: mit" in text
    assert "The head is published under `mit`." in text
    assert "no tokenizer files" in capsys.readouterr().out
    text = (export(tmp_path, "medusa", name="none") / "README.md").read_text()
    assert "license: other\nlicense_name: not-stated" in text
    assert "named no licence" in text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("medusa", "may have been started from its lm_head"),
        ("medusa-shared", "No tensor here is a copy of the target's; they were trained"),
        ("mlp-speculator", "No tensor here is a copy of the target's; they were trained"),
        ("eagle-vllm", "These files hold a copy of the embedding of the target"),
        ("eagle3", "may have been started from its lm_head"),  # of another width, it trains an embedding of its own
    ],
)
def test_the_card_says_what_the_files_hold_of_the_target(tmp_path, kind, said):
    text = (export(tmp_path, kind) / "README.md").read_text()
    assert said in text
    assert (
        ", exported with Headstart." in text
    )  # without a recipe the card must not claim that Headstart trained the head


def test_a_drawing_as_a_file_stands_alone():
    drawing = line_chart([("", [(0, 1.0), (10, 2.0)])], title="A & B", y_label="y")
    root = ElementTree.fromstring(as_file(drawing))
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text
    for variable in re.findall(r"var\((--[a-z0-9-]+)\)", as_file(drawing)):
        assert f"{variable}:" in style
    assert "A & B" in [element.text for element in root.iter()]
    assert as_file("") == ""
