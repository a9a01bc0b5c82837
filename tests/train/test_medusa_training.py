"""The training script as a whole, on a tiny target: what it computes, and that every key does something."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads.checkpoint import load_head
from headstart.tests.train.conftest import all_lines
from headstart.train import medusa
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.run.optimization import NonFiniteLoss


def run(arguments, **keys):
    assert medusa.main(arguments(**keys)) == 0


def approximately(line, tolerance):
    """A line of metrics.jsonl whose numbers may differ by rounding."""
    return {k: pytest.approx(v, rel=tolerance, abs=tolerance) if isinstance(v, float) else v for k, v in line.items()}


def head_tensors(folder):
    return load_file(Path(folder) / "head" / "medusa_lm_head.safetensors")


def test_first_loss_is_that_of_the_plain_model_on_unpacked_conversations(
    arguments, read_metrics, word_target, conversations, capsys, tmp_path
):
    """Packing, masks, alignment and the divisor at once: the target alone on each text, heads that are still the identity."""
    run(arguments, row_length=256, batch_rows=1, max_steps=1)
    num_rows = int(capsys.readouterr().err.split(" conversations in ")[1].split()[0])
    run(arguments, row_length=256, batch_rows=num_rows, max_steps=1, output=tmp_path / "whole")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(word_target), AutoTokenizer.from_pretrained(word_target)
    total, count, own = 0.0, 0, [[0.0, 0] for _ in range(3)]
    for ids, marks in encode_conversations(tokenizer, load_conversations(conversations)):
        with torch.no_grad():
            log_distribution = F.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        for k in range(3):
            for y in range(2 + k, len(ids)):
                if marks[y]:
                    soft = float(
                        (log_distribution[y - 1].exp() * (log_distribution[y - 1] - log_distribution[y - 2 - k])).sum()
                    )
                    total += 0.8**k * soft
                    count += k == 0
                    own[k][0] += soft
                    own[k][1] += 1
    (line,) = read_metrics(run="whole")
    assert line["loss"] == pytest.approx(total / count, rel=1e-5)
    for k in range(3):
        assert line[f"head{k}_loss"] == pytest.approx(own[k][0] / own[k][1], rel=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_every_head_learns_in_blocks_of_its_own(arguments, read_metrics, tmp_path, shared):
    run(arguments, max_steps=40, lr=0.03, num_layers=2, shared_lm_head=shared, eval_prompts=4, eval_tokens=24)
    lines = read_metrics()
    for k in range(3):
        assert lines[-1][f"head{k}_loss"] < 0.8 * lines[0][f"head{k}_loss"]
    head = load_head(tmp_path / "run")
    blocks = [block.linear for one in head.heads for block in one.blocks]
    assert len(blocks) == 6
    for i, block in enumerate(blocks):
        assert block.weight.abs().max() > 1e-3
        assert block.bias.abs().max() > 1e-3
        assert all((block.weight - other.weight).abs().max() > 1e-3 for other in blocks[:i])
    if not shared:
        own = [one.lm_head.weight for one in head.heads]
        target = AutoModelForCausalLM.from_pretrained(head.config.base_model_name_or_path).lm_head.weight
        assert all((weight - target).abs().max() > 1e-3 for weight in own)
        assert (own[1] - own[2]).abs().max() > 1e-3
    # The engine's own figure, measured on the held-out prompts with these weights.
    (acceptance,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert acceptance["source"] == saved["source"] == "engine"
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["per_position"]))
    assert acceptance["acceptance_length"] > 1.05
    assert saved["samples"][0]["prompt"].startswith("<|user|>")


def test_accumulating_eight_micro_steps_is_one_batch_of_eight(arguments, read_metrics, tmp_path):
    run(arguments, batch_rows=8, accumulate=1)
    run(arguments, batch_rows=1, accumulate=8, output=tmp_path / "eight")
    one, eight = read_metrics(), read_metrics(run="eight")
    assert len(one) == len(eight) == 6
    for a, b in zip(one, eight):
        assert a == approximately(b, 3e-6)
    # The rows differ in their numbers of labels, so a mean of means would be off by far more than the bound.
    for name, tensor in head_tensors(tmp_path / "run").items():
        torch.testing.assert_close(head_tensors(tmp_path / "eight")[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


def test_cached_features_train_as_computed_ones(arguments, read_metrics, tmp_path, capsys):
    run(arguments)
    assert "feature cache" not in capsys.readouterr().err
    run(arguments, cache_features=True, output=tmp_path / "cached")
    for a, b in zip(read_metrics(), read_metrics(run="cached"), strict=True):
        assert a == approximately(b, 1e-5)
    said = capsys.readouterr().err
    assert "rows x 64 tokens x 32 values in float32 take" in said
    assert said.index("feature cache") < said.index("features:")
    assert not (tmp_path / "cached" / "features").exists()


def test_autocast_keeps_weights_and_optimiser_in_fp32(arguments, tmp_path):
    run(arguments, autocast="bf16", max_steps=2)
    assert {tensor.dtype for tensor in head_tensors(tmp_path / "run").values()} == {torch.float32}
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    moments = [entry[name] for entry in state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * 3 * 3
    assert {moment.dtype for moment in moments} == {torch.float32}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("autocast", ["no", "bf16"])
def test_bfloat16_target_trains_nearly_as_the_fp32_one(arguments, read_metrics, tmp_path, shared, autocast):
    keys = {"shared_lm_head": shared, "eval_prompts": 2, "eval_tokens": 6}
    run(arguments, **keys)
    run(arguments, **keys, target_dtype="bfloat16", autocast=autocast, output=tmp_path / "half")
    for a, b in zip(read_metrics(), read_metrics(run="half"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)


def test_non_finite_loss_stops_before_the_step_and_says_what_was_fed(arguments, tmp_path, read_metrics):
    with pytest.raises(NonFiniteLoss, match=r"step 2 is not finite; .*rows \[\d+, \d+\].*<\|user\|>"):
        medusa.main(arguments(lr=1e38, warmup_ratio=0, max_grad_norm=0))
    assert [line["step"] for line in read_metrics()] == [1]
    assert not (tmp_path / "run" / "head").exists()


def test_non_finite_loss_ends_the_command_with_a_message_and_a_status(arguments, run_script):
    status, said = run_script(arguments(lr=1e38, warmup_ratio=0, max_grad_norm=0))
    assert status == 1
    assert "error: the loss of step 2 is not finite" in said


# ---- every key does something ----

CHANGES = {
    "seed": 1,
    "target_dtype": "bfloat16",
    "max_tokens": 300,
    "row_length": 48,
    "num_heads": 2,
    "num_layers": 2,
    "shared_lm_head": True,
    "loss": "lk",
    "head_weight_decay": 0.5,
    "lr": 0.02,
    "warmup_ratio": 0.5,
    "min_lr_ratio": 0.5,
    "weight_decay": 0.3,
    "beta1": 0.5,
    "beta2": 0.9,
    "max_grad_norm": 0.1,
    "batch_rows": 3,
    "accumulate": 2,
    "max_steps": 5,
    "chunk_tokens": 3,
    "autocast": "bf16",
    "cache_features": False,
    "cache_dtype": "bfloat16",
    "log_every": 2,
    "eval_every": 2,
    "eval_prompts": 3,
    "eval_tokens": 9,
    "checkpoint_every": 3,
    "keep_checkpoints": 1,
}
BASE = {"cache_features": True, "eval_prompts": 4, "eval_tokens": 12, "eval_every": 3, "checkpoint_every": 2}


def observe(arguments, folder, capsys, **keys):
    """All that a run leaves behind, apart from what the clock and the memory decide and from the recipe itself."""
    run(arguments, **(BASE | {"output": folder} | keys))
    lines = all_lines(folder)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    weights = {name: tensor.tolist() for name, tensor in head_tensors(folder).items()}
    return lines, files, weights, "feature cache" in capsys.readouterr().err


@pytest.fixture(scope="module")
def observed():
    """What the first test that asks for the baseline sees, for all."""
    return []


@pytest.fixture
def baseline(arguments, tmp_path, capsys, observed):
    if not observed:
        observed.append(observe(arguments, tmp_path / "base", capsys))
    return observed[0]


@pytest.mark.parametrize("name", CHANGES)
def test_key_changes_the_run(arguments, baseline, tmp_path, capsys, name):
    assert observe(arguments, tmp_path / "changed", capsys, **{name: CHANGES[name]}) != baseline


def test_equal_recipes_give_equal_runs(arguments, baseline, tmp_path, capsys):
    """After the test above: what is left of other runs in this process changes nothing, so its keys do."""
    assert observe(arguments, tmp_path / "again", capsys) == baseline


def test_lk_eta_changes_lk_and_each_loss_trains_its_own_way(arguments, tmp_path, capsys):
    runs = [{"loss": "hard"}, {"loss": "lk-log"}, {"loss": "lk"}, {"loss": "lk", "lk_eta": 1}]
    seen = [observe(arguments, tmp_path / str(i), capsys, eval_prompts=0, **keys)[2] for i, keys in enumerate(runs)]
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


def test_num_epochs_decides_where_max_steps_does_not(arguments, tmp_path, capsys):
    short = observe(arguments, tmp_path / "short", capsys, max_steps=0, num_epochs=0.5)
    assert len(observe(arguments, tmp_path / "long", capsys, max_steps=0, num_epochs=1)[0]) > len(short[0])


def test_eval_data_replaces_the_split(arguments, baseline, tmp_path, capsys):
    other = tmp_path / "held_out.jsonl"
    messages = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5 w6 w7 w8"}]
    other.write_text(json.dumps({"messages": messages}))
    lines, *_ = observe(arguments, tmp_path / "other", capsys, eval_data=other)
    samples = json.loads((tmp_path / "other" / "acceptance.json").read_text())["samples"]
    assert [sample["prompt"] for sample in samples] == ["<|user|> w1 w2 w3 <|assistant|>"]
    # Nothing was taken out of the training data for it.
    assert lines[-1]["step"] == 6
    assert lines != baseline[0]


def test_every_field_of_the_recipe_is_accounted_for():
    """target, data, output, resume, resume_from, tracker and feature_cache have tests of their own, here and beside this file."""
    elsewhere = {"target", "data", "output", "resume", "resume_from", "tracker", "num_epochs", "eval_data", "lk_eta"}
    elsewhere |= {"stage", "start_from", "target_loss", "medusa_weight", "target_lr"}  # test_medusa_joint.py
    elsewhere |= {"lora_rank", "lora_alpha", "lora_dropout", "lora_targets"}
    elsewhere |= {"feature_cache", "log_checkpoints"}  # of these also: test_feature_cache.py, test_artifacts.py
    assert {f.name for f in fields(medusa.Recipe)} == set(CHANGES) | elsewhere


def test_every_field_is_read_by_the_run(arguments, monkeypatch, tmp_path):
    """Saving and checking the recipe go around attribute access, so what is seen here is what the run asks for."""
    names, seen = {f.name for f in fields(medusa.Recipe)}, set()

    class Watched(medusa.Recipe):
        def __getattribute__(self, name):
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(medusa, "Recipe", Watched)
    run(arguments, max_steps=0, num_epochs=0.2, **{k: v for k, v in BASE.items() if k != "checkpoint_every"})
    run(arguments, max_steps=0, num_epochs=0.2, resume=True, **BASE)
    joint = {"stage": "joint", "start_from": tmp_path / "run", "output": tmp_path / "joint", "cache_features": False}
    run(arguments, **(BASE | {"max_steps": 1} | joint))
    assert names - seen == set()
