"""Recipes: defaults < config file < command line, and what is refused."""

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest
import torch

from headstart.train import block, eagle, eagle3, mlp_speculator
from headstart.train.medusa import Recipe
from headstart.train.run.recipe import check_values, key, parse_recipe, resolved_values, save_recipe

CONFIGS = Path(__file__).parents[3] / "configs"
NEEDED = ["--target", "t", "--data", "d", "--output", "o"]


@dataclass(frozen=True)
class Small:
    name: str = key(MISSING, "a name")
    rate: float = key(0.5, "a rate", least=0, most=1)
    count: int = key(3, "a count", least=1)
    fast: bool = key(False, "fast or not")
    mode: str = key("auto", "a mode", choices=("auto", "no"))

    def __post_init__(self):
        check_values(self)


def parse(*words):
    return parse_recipe(Small, list(words), "what it does")


def test_command_line_wins_over_config_over_default(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: from-file\nrate: 1e-3\ncount: 7\n")
    recipe = parse("--config", str(path), "--count=9", "--fast")
    assert resolved_values(recipe) == {"name": "from-file", "rate": 1e-3, "count": 9, "fast": True, "mode": "auto"}


def test_values_take_their_fields_type(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: 7\nrate: 1\ncount: 1e2\nfast: yes\nmode: no\n")
    recipe = parse("--config", str(path))
    assert resolved_values(recipe) == {"name": "7", "rate": 1.0, "count": 100, "fast": True, "mode": "no"}
    assert parse("--name", "x", "--fast", "false").fast is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "x", "--raet", "1"], "unknown key 'raet'; did you mean 'rate'"),
        (["--name", "x", "--count", "2.5"], "--count must be a whole number, got '2.5'"),
        (["--name", "x", "--rate", "fast"], "--rate must be a number"),
        (["--name", "x", "--rate", "nan"], "rate must be finite"),
        (["--name", "x", "--rate", "1.5"], "rate must be at most 1"),
        (["--name", "x", "--count", "0"], "count must be at least 1"),
        (["--name", "x", "--mode", "on"], "mode must be one of auto, no"),
        (["--name", "x", "--fast", "maybe"], "--fast must be true or false"),
        (["--name"], "--name needs a value"),
        (["--name", " "], "name must be given"),
        (["name"], "expected --key value"),
        ([], "must be given: name"),
        (["--config", "missing.yaml"], "'missing.yaml' does not exist"),
    ],
)
def test_bad_command_lines_say_what_is_wrong(words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("naem: x", "unknown key in .*'naem'; did you mean 'name'"),
        ("- 1", "lines of `key: value`"),
        ("a: [", "is not YAML"),
        ("name: x\ncount: [1]", "count must be a whole number"),
        ("name: {a: 1}", "name must be a text"),
    ],
)
def test_bad_config_files_are_named(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse("--config", str(path))


def test_saved_recipe_reads_back_the_same(tmp_path):
    recipe = parse_recipe(Recipe, [*NEEDED, "--lr", "3e-7", "--autocast", "no", "--num_epochs", "2"], "")
    save_recipe(resolved_values(recipe), tmp_path / "config.yaml")
    assert parse_recipe(Recipe, ["--config", str(tmp_path / "config.yaml")], "") == recipe


def test_help_lists_every_key_with_default_and_explanation(capsys):
    with pytest.raises(SystemExit) as left:
        parse_recipe(Recipe, ["--help"], "Train Medusa heads")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for f in fields(Recipe):
        assert f"--{f.name} (" in text
        assert f.metadata["help"] in text
        if f.default is not MISSING:
            assert f"--{f.name} (default {f.default!r})" in text


def test_an_unknown_loss_is_refused_by_name():
    with pytest.raises(ValueError, match="loss must be one of hard, kl, lk, lk-log, hard-l1, tv, got 'ce'"):
        parse_recipe(Recipe, [*NEEDED, "--loss", "ce"], "")


def test_recipe_cannot_be_changed_after_it_is_made():
    with pytest.raises(AttributeError):
        parse_recipe(Recipe, NEEDED, "").lr = 1.0


@pytest.mark.parametrize("name", ["quickstart.yaml", "medusa.yaml"])
def test_shipped_configs_parse(name):
    recipe = parse_recipe(Recipe, ["--config", str(CONFIGS / name)], "")
    assert recipe.num_heads == 4


@pytest.mark.parametrize(
    ("name", "first"), [("medusa2-quickstart.yaml", "quickstart.yaml"), ("medusa2.yaml", "medusa.yaml")]
)
def test_shipped_configs_of_the_joint_stage_go_on_with_heads_of_the_same_shape(name, first):
    joint, heads = (parse_recipe(Recipe, ["--config", str(CONFIGS / one)], "") for one in (name, first))
    assert (joint.stage, heads.stage, joint.target) == ("joint", "heads", heads.target)
    assert (joint.num_heads, joint.num_layers) == (heads.num_heads, heads.num_layers)
    # The paper's, as the rates are, but for its weight of 0.2.
    assert (joint.lora_rank, joint.lora_alpha, joint.medusa_weight) == (32, 16, 0.1)
    assert joint.lr == pytest.approx(4 * joint.target_lr) == pytest.approx(2e-3)
    # What it starts from is what the commands in its first lines leave.
    told = "".join(line for line in (CONFIGS / name).read_text().splitlines() if line.startswith("#"))
    assert first in told
    assert joint.start_from == heads.output or f"--output {joint.start_from}" in told
    assert joint.shared_lm_head == heads.shared_lm_head or "--shared_lm_head true" in told


@pytest.mark.parametrize(
    "name", ["mlp-speculator-quickstart.yaml", "mlp-speculator.yaml", "mlp-speculator-stage2.yaml"]
)
def test_shipped_configs_of_mlp_speculators_parse(name):
    recipe = parse_recipe(mlp_speculator.Recipe, ["--config", str(CONFIGS / name)], "")
    assert recipe.stage == (2 if "stage2" in name else 1)
    # Every key is said on a line of its own: what is left to a default is not a part of the recipe.
    lines = (CONFIGS / name).read_text().splitlines()
    said = {line.split(":")[0] for line in lines if not line.startswith("#")}
    assert {"target", "data", "output", "loss", "lr", "num_steps", "inner_size", "batch_rows"} <= said
    assert any(line.startswith("#   accelerate launch") and "train/mlp_speculator.py" in line for line in lines)


@pytest.mark.parametrize("trainer", [eagle, eagle3])
@pytest.mark.parametrize("size", ["", "-quickstart"])
def test_shipped_configs_of_eagle_heads_parse(trainer, size):
    name = trainer.__name__.rpartition(".")[2]
    path = CONFIGS / f"{name}{size}.yaml"
    recipe = parse_recipe(trainer.Recipe, ["--config", str(path)], "")
    assert recipe.target == ("assets/stdlib-coder" if size else "meta-llama/Llama-3.1-8B-Instruct")
    lines = path.read_text().splitlines()
    said = {line.split(":")[0] for line in lines if not line.startswith("#")}
    own = {
        "eagle": {"token_weight", "feature_weight", "noise"},
        "eagle3": {"step_decay", "draft_vocab_size", "aux_layers"},
    }
    assert {"output", "loss", "lr", "num_steps", "num_speculative_tokens", "batch_rows"} | own[name] <= said
    launches = [line for line in lines if line.startswith("#   accelerate launch")]
    assert len(launches) == (1 if size else 2)
    assert all(f"train/{name}.py --config configs/{path.name}" in line for line in launches)


@pytest.mark.parametrize("size", ["", "-quickstart"])
def test_shipped_configs_of_block_drafters_parse(size):
    path = CONFIGS / f"block{size}.yaml"
    recipe = parse_recipe(block.Recipe, ["--config", str(path)], "")
    assert recipe.target == ("assets/stdlib-coder" if size else "meta-llama/Llama-3.1-8B-Instruct")
    lines = path.read_text().splitlines()
    said = {line.split(":")[0] for line in lines if not line.startswith("#")}
    assert {"output", "loss", "lr", "num_layers", "block_size", "edge_rank", "num_anchors", "batch_rows"} <= said
    launches = [line for line in lines if line.startswith("#   accelerate launch")]
    assert len(launches) == (1 if size else 2)
    assert all(f"train/block.py --config configs/{path.name}" in line for line in launches)
    if not size:  # the published recipe, for blocks of eight
        assert (recipe.lr, recipe.warmup_ratio, recipe.beta1, recipe.beta2) == (6e-4, 0.04, 0.9, 0.95)
        assert (recipe.num_anchors, recipe.row_length, recipe.max_grad_norm) == (512, 3072, 1.0)
        assert recipe.objective.weights == pytest.approx([math.exp(-k / 4) for k in range(7)])


@pytest.mark.parametrize(
    ("keys", "gamma", "num_depths"),
    [
        ({"block_size": 16}, 7, 15),
        ({"block_size": 10}, 5, 9),
        ({"block_size": 8, "sample_from_anchor": "true"}, 4, 8),
        ({"block_size": 8, "gamma": 2.5}, 2.5, 7),
    ],
)
def test_weights_of_a_blocks_depths(keys, gamma, num_depths):
    words = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    given = ["--target", "t", "--data", "d", "--output", "o", *words]
    weights = parse_recipe(block.Recipe, given, "").objective.weights
    assert weights == pytest.approx([math.exp(-k / gamma) for k in range(num_depths)])
    even = parse_recipe(block.Recipe, [*given, "--depth_weights", "none"], "").objective
    dynamic = parse_recipe(block.Recipe, [*given, "--depth_weights", "dpace", "--loss", "hard"], "").objective
    assert even.weights == [1.0] * num_depths
    assert (even.dynamic, dynamic.dynamic) == (False, True)


def test_default_layers_that_a_block_drafter_reads():
    assert block.default_aux_layers(36) == (2, 10, 18, 26, 34)  # of published heads for Qwen3-8B
    assert block.default_aux_layers(32) == (2, 9, 16, 23, 30)
    assert block.default_aux_layers(8) == (2, 3, 4, 5, 6)
    assert block.default_aux_layers(7) == (2, 3, 4, 5, 6)
    assert (block.default_aux_layers(2), block.default_aux_layers(1)) == ((1,), (0,))


def test_default_mask_token_has_an_embedding_and_ends_nothing():
    table = torch.ones(9, 4)
    table[8] = 0  # never trained
    assert block.choose_mask_token(table, {7, 99}) == 6
    with pytest.raises(ValueError, match="name one with mask_token_id"):
        block.choose_mask_token(table, {*range(8)})


def test_stage_2_goes_on_with_the_head_of_stage_1_at_a_tenth_of_its_rate():
    first, second = (
        parse_recipe(mlp_speculator.Recipe, ["--config", str(CONFIGS / f"mlp-speculator{stage}.yaml")], "")
        for stage in ("", "-stage2")
    )
    assert second.start_from == first.output
    assert second.lr == pytest.approx(first.lr / 10)
    shape = ("target", "num_steps", "inner_size", "tie_weights", "scale_input")
    assert all(getattr(first, name) == getattr(second, name) for name in shape)


def test_learning_rate_rises_then_falls_as_a_cosine():
    recipe = parse_recipe(Recipe, [*NEEDED, "--lr", "2", "--warmup_ratio", "0.1", "--min_lr_ratio", "0.25"], "")
    rates = [recipe.learning_rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(2 * (0.25 + 0.75 * 0.5))
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.5 < rates[99] < 0.502


def test_steps_come_from_epochs_unless_they_are_given():
    assert parse_recipe(Recipe, [*NEEDED, "--num_epochs", "1.5"], "").num_updates(100, 8) == 19
    assert parse_recipe(Recipe, [*NEEDED, "--max_steps", "5"], "").num_updates(100, 8) == 5
