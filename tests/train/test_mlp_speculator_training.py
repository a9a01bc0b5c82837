"""The MLP speculator's training script on a tiny target: what it computes, and that every key does something."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import headstart.heads.mlp_speculator as head_module
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.tests.train.conftest import all_lines
from headstart.train import mlp_speculator
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.loss import distillation
from headstart.train.run import loop
from headstart.train.run.optimization import NonFiniteLoss

SHAPE = (32, 48, 24, 3)  # hidden, vocabulary, inner, steps


def run(arguments, **keys):
    assert mlp_speculator.main(arguments(**keys)) == 0


def head_tensors(folder):
    return load_file(Path(folder) / "head" / "model.safetensors")


@pytest.fixture
def saved_head(tmp_path):
    """saved_head(**config) -> folder of a head with weights that all do something."""

    def save(name="start", **keys):
        torch.manual_seed(5)
        head = MLPSpeculator(MLPSpeculatorConfig(*SHAPE, **keys))
        for norm in head.ln:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias, std=0.3)
        save_head(head, tmp_path / name)
        return tmp_path / name

    return save


def by_definition(target, conversations, tensors, tied, scaled, name, shift=0, eta=3.0):
    """Sums of the losses per step and their counts, one document and one position at a time, written from the paper's formulae.

    tensors: the file's; shift: how far the tokens that the steps read are off (0: as they should be).
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).double(), AutoTokenizer.from_pretrained(target)
    w = {key.removeprefix("speculator."): value.double() for key, value in tensors.items()}
    sw = 0.5 ** (0.5 / 3)
    ew = math.sqrt((1 - sw**2) * 24 / 2)
    losses, alphas, counts = [0.0] * 3, [0.0] * 3, [0] * 3
    for ids, marks in encode_conversations(tokenizer, load_conversations(conversations)):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        features, distribution = out.hidden_states[-1][0], out.logits[0].softmax(-1)
        for t in range(len(ids)):
            state = features[t]
            if scaled:
                state = state / torch.sqrt(state.square().mean() + 1e-6) / math.sqrt(2)
            for i in range(3):
                if t + 2 + i >= len(ids):
                    break
                own, proj = (0, min(i, 1)) if tied else (i, i)
                token = ids[(t + 1 + i + shift) % len(ids)]
                state = w[f"proj.{proj}.weight"] @ state + (ew / sw) * w[f"emb.{own}.weight"][token]
                state = state / torch.sqrt(state.square().mean() + 1e-6) * w[f"ln.{own}.weight"] + w[f"ln.{own}.bias"]
                state = 0.5 * state * (1 + torch.erf(state / math.sqrt(2)))
                if not marks[t + 2 + i]:
                    continue
                q, p = (w[f"head.{own}.weight"] @ state).softmax(-1), distribution[t + 1 + i]
                kl, alpha = (p * (p / q).log()).sum(), torch.minimum(p, q).sum()
                values = {"hard": -q[ids[t + 2 + i]].log(), "kl": kl, "lk": kl, "lk-log": -alpha.log()}
                alphas[i] += float(alpha)
                losses[i] += float(values[name])
                counts[i] += 1
    if name == "lk":  # of the second step, which knows the first one's rates of acceptance
        weights = [math.exp(-eta * alpha / count) for alpha, count in zip(alphas, counts)]
        losses = [w * kl + (1 - w) * (count - alpha) for w, kl, count, alpha in zip(weights, losses, counts, alphas)]
    return losses, counts


@pytest.mark.parametrize(
    ("name", "tied", "scaled"),
    [("kl", True, True), ("hard", False, False), ("lk", True, False), ("lk-log", False, True)],
)
def test_losses_are_those_of_the_formulae_on_unpacked_conversations(
    speculator_arguments, read_metrics, word_target, conversations, saved_head, capsys, tmp_path, name, tied, scaled
):
    """Packing, masks, alignment of features, tokens and distributions, and the divisor at once."""
    start = saved_head(tie_weights=tied, scale_input=scaled)
    keys = {"row_length": 256, "max_steps": 2, "lr": 0, "loss": name, "start_from": start, "step_weight_decay": 0.7}
    keys |= {"tie_weights": tied, "scale_input": scaled}
    run(speculator_arguments, batch_rows=1, **keys)
    num_rows = int(capsys.readouterr().err.split(" conversations in ")[1].split()[0])
    run(speculator_arguments, batch_rows=num_rows, output=tmp_path / "whole", **keys)
    *_, line = read_metrics(run="whole")
    given = (word_target, conversations, load_file(start / "model.safetensors"), tied, scaled, name)
    losses, counts = by_definition(*given)
    for i in range(3):
        assert line[f"head{i}_loss"] == pytest.approx(losses[i] / counts[i], rel=2e-5)
    total = sum(0.7**i * loss for i, loss in enumerate(losses)) / counts[0]
    assert line["loss"] == pytest.approx(total, rel=2e-5)
    if name == "kl":
        shifted, _ = by_definition(*given, shift=1)
        assert abs(shifted[1] / losses[1] - 1) > 1e-3  # what the bound above would catch


@pytest.mark.parametrize("mutant", ["tokens early", "tokens late", "labels", "distribution"])
def test_anything_off_by_one_changes_the_loss(
    speculator_arguments, read_metrics, saved_head, tmp_path, monkeypatch, mutant
):
    keys = {"max_steps": 1, "start_from": saved_head(), "batch_rows": 8, "loss": "hard" if mutant == "labels" else "kl"}
    run(speculator_arguments, **keys)
    if mutant.startswith("tokens"):
        true, step = head_module.next_tokens, 1 if mutant == "tokens early" else -1
        monkeypatch.setattr(head_module, "next_tokens", lambda ids, n: true(ids, n).roll(step, 1))
    elif mutant == "labels":
        find = loop.find_labels

        def late(input_ids, *rest):
            return find(input_ids.roll(-1, 1), *rest)

        monkeypatch.setattr(loop, "find_labels", late)
    else:
        distribution = distillation.target_distribution
        monkeypatch.setattr(
            distillation, "target_distribution", lambda logits, *rest: distribution(logits.roll(1, 0), *rest)
        )
    run(speculator_arguments, output=tmp_path / "mutant", **keys)
    right, wrong = read_metrics()[0]["loss"], read_metrics(run="mutant")[0]["loss"]
    assert abs(wrong / right - 1) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_every_step_learns_and_every_weight_moves(speculator_arguments, read_metrics, saved_head, tmp_path, tied):
    keys = {"max_steps": 60, "lr": 0.02, "batch_rows": 4, "loss": "hard"}
    start = saved_head(tie_weights=tied)
    run(speculator_arguments, tie_weights=tied, start_from=start, **keys)
    lines = read_metrics()
    for k in range(3):
        assert lines[-1][f"head{k}_loss"] < 0.8 * lines[0][f"head{k}_loss"]
    before, after = load_file(start / "model.safetensors"), head_tensors(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)
    assert load_head(tmp_path / "run").config.tie_weights == tied


def test_acceptance_is_the_engines_own_on_held_out_prompts(speculator_arguments, read_metrics, tmp_path):
    keys = {"max_steps": 60, "lr": 0.02, "batch_rows": 4, "log_every": 60}
    run(speculator_arguments, eval_prompts=4, eval_tokens=24, **keys)
    (acceptance,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert acceptance["source"] == saved["source"] == "engine"
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["per_position"]))
    assert acceptance["acceptance_length"] > 1.05


def test_target_that_the_engine_does_not_run_is_measured_teacher_forced(
    speculator_arguments, read_metrics, word_target, tmp_path, capsys
):
    config = {"vocab_size": 48, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 256, "eos_token_id": 2}
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(**config, bos_token_id=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(word_target).save_pretrained(folder)
    # Of text that counts upwards, taught the next word: the chain of first choices holds for a while.
    keys = {"target": folder, "loss": "hard", "num_epochs": 12, "max_steps": 0, "lr": 0.02, "batch_rows": 4}
    run(speculator_arguments, eval_prompts=6, eval_tokens=6, log_every=50, **keys)
    assert "acceptance is teacher-forced on the held-out text, not the engine's" in capsys.readouterr().err
    (line,) = read_metrics("acceptance")
    assert line["source"] == "teacher_forced"
    assert line["acceptance_length"] == pytest.approx(1 + sum(line["per_position"]))
    assert line["acceptance_length"] > 2
    assert line["per_position"] == sorted(line["per_position"], reverse=True)


def test_accumulating_eight_micro_steps_is_one_batch_of_eight(speculator_arguments, read_metrics, tmp_path):
    run(speculator_arguments, batch_rows=8, accumulate=1)
    run(speculator_arguments, batch_rows=1, accumulate=8, output=tmp_path / "eight")
    for a, b in zip(read_metrics(), read_metrics(run="eight"), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-5, abs=1e-6) if isinstance(v, float) else v for k, v in b.items()}
    for name, tensor in head_tensors(tmp_path / "run").items():
        torch.testing.assert_close(head_tensors(tmp_path / "eight")[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_all_tokens_are_supervised_if_the_recipe_says_so(speculator_arguments, word_target, conversations, capsys):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    encoded = encode_conversations(tokenizer, load_conversations(conversations))
    counted = {}
    for supervise in ("assistant", "all"):
        run(speculator_arguments, max_steps=1, supervise=supervise, output=f"{speculator_arguments()[5]}-{supervise}")
        counted[supervise] = int(capsys.readouterr().err.split(" tokens, ")[1].split(" labels")[0])
    assert counted["all"] == sum(len(ids) - 2 for ids, _ in encoded)
    assert counted["assistant"] == sum(sum(marks[2:]) for _, marks in encoded) < counted["all"]


def test_bfloat16_target_and_autocast_train_nearly_as_in_fp32(speculator_arguments, read_metrics, tmp_path):
    run(speculator_arguments)
    run(speculator_arguments, target_dtype="bfloat16", autocast="bf16", output=tmp_path / "half")
    for a, b in zip(read_metrics(), read_metrics(run="half"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
    assert {tensor.dtype for tensor in head_tensors(tmp_path / "half").values()} == {torch.float32}


def test_non_finite_loss_stops_before_the_step_and_says_what_was_fed(speculator_arguments, tmp_path, read_metrics):
    with pytest.raises(NonFiniteLoss, match=r"step 2 is not finite; .*rows \[\d+, \d+\].*<\|user\|>"):
        mlp_speculator.main(speculator_arguments(lr=1e38, warmup_ratio=0, max_grad_norm=0))
    assert [line["step"] for line in read_metrics()] == [1]
    assert not (tmp_path / "run" / "head").exists()


# ---- what it starts from ----


def test_it_starts_from_the_weights_of_another_head(speculator_arguments, saved_head, tmp_path):
    start = saved_head()
    run(speculator_arguments, max_steps=1, lr=0, start_from=start)
    before, after = load_file(start / "model.safetensors"), head_tensors(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_steps": 4}, "is a head of num_steps 3, this run asks for 4"),
        ({"inner_size": 0}, "is a head of inner_size 24, this run asks for 32"),
        ({"tie_weights": False}, "is a head of tie_weights True, this run asks for False"),
        ({"scale_input": False}, "is a head of scale_input True, this run asks for False"),
    ],
)
def test_start_of_another_shape_is_refused(speculator_arguments, saved_head, tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        mlp_speculator.main(speculator_arguments(start_from=saved_head(), **keys))
    assert not (tmp_path / "run").exists()


def test_start_of_another_family_or_from_nothing_is_refused(speculator_arguments, tmp_path):
    save_head(Medusa(MedusaConfig(32, 48, num_heads=3)), tmp_path / "medusa")
    with pytest.raises(ValueError, match="holds a head of the family Medusa, not an MLP speculator"):
        mlp_speculator.main(speculator_arguments(start_from=tmp_path / "medusa"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no head"):
        mlp_speculator.main(speculator_arguments(start_from=tmp_path / "empty"))
    assert not (tmp_path / "run").exists()


# ---- every key does something ----

CHANGES = {
    "seed": 1,
    "max_tokens": 300,
    "row_length": 48,
    "loss": "hard",
    "lr": 0.02,
    "weight_decay": 0.9,
    "beta1": 0.5,
    "beta2": 0.5,
    "num_steps": 2,
    "inner_size": 16,
    "tie_weights": False,
    "scale_input": False,
    "step_weight_decay": 0.5,
    "supervise": "all",
}


def observe(arguments, folder, **keys):
    """All that a run leaves behind, apart from what the clock and the memory decide and from the recipe itself."""
    run(arguments, **({"output": folder, "max_steps": 3} | keys))
    return all_lines(folder), {name: tensor.tolist() for name, tensor in head_tensors(folder).items()}


def test_keys_change_the_run_and_equal_recipes_do_not(speculator_arguments, tmp_path):
    base = observe(speculator_arguments, tmp_path / "base")
    assert observe(speculator_arguments, tmp_path / "again") == base
    lk = observe(speculator_arguments, tmp_path / "lk", loss="lk")
    assert observe(speculator_arguments, tmp_path / "eta", loss="lk", lk_eta=9) != lk
    for name, value in CHANGES.items():
        assert observe(speculator_arguments, tmp_path / name, **{name: value}) != base, name


def test_every_field_is_read_by_the_run(speculator_arguments, monkeypatch, saved_head):
    """Keys that other trainers have too change a run in the tests of train/medusa.py; here they are seen to be asked for."""
    names, seen = {f.name for f in fields(mlp_speculator.Recipe)}, set()

    class Watched(mlp_speculator.Recipe):
        def __getattribute__(self, name):
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(mlp_speculator, "Recipe", Watched)
    keys = {"cache_features": True, "eval_prompts": 4, "eval_tokens": 12, "max_steps": 0, "num_epochs": 0.2}
    keys |= {"stage": 2, "start_from": saved_head(), "prompt_tokens": 5, "answer_tokens": 6, "num_prompts": 9}
    run(speculator_arguments, **keys)
    run(speculator_arguments, resume=True, **keys)
    assert names - seen == set()
