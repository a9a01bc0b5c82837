"""The EAGLE training script on a tiny target: what it computes, and that every key does something."""

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import headstart.heads.eagle as head_module
from headstart.heads.checkpoint import load_head
from headstart.heads.eagle import Eagle
from headstart.tests.heads.eagle_reference import layer_rows, project
from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import eagle
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.loss import distillation
from headstart.train.run import loop
from headstart.train.run.checkpointing import list_checkpoints


def run(arguments, **keys):
    assert eagle.main(arguments(**keys)) == 0


def head_tensors(folder):
    return load_file(Path(folder) / "head" / "model.safetensors")


@pytest.fixture
def few(conversations, tmp_path):
    """A .jsonl of a dozen conversations."""
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(Path(conversations).read_text().splitlines()[:6]))
    return str(path)


@pytest.fixture
def sharp(monkeypatch):
    """New heads attend to some rows far more than to others, so that positions matter."""

    def build(config):
        head = Eagle(config)
        for projection in (head.layers[0].self_attn.q_proj, head.layers[0].self_attn.k_proj):
            projection.weight.data.mul_(5)
        return head

    monkeypatch.setattr(eagle, "Eagle", build)


def by_definition(target, data, folder, name, top, shift=0):
    """Per step: sums of token and feature losses and their count; one document and one position at a time.

    top: tokens of HASS's term, 0 for none; shift: how far the labels are off (0: as they should be).
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).double(), AutoTokenizer.from_pretrained(target)
    config, w = load_head(folder).config, {key: one.double() for key, one in head_tensors(folder).items()}
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight
    sums, kls, alphas, counts = torch.zeros(2, 2), [0.0, 0.0], [0.0, 0.0], [0, 0]
    for ids, marks in encode_conversations(tokenizer, load_conversations(data)):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        features, distribution = out.hidden_states[-1][0], out.logits[0].softmax(-1)
        states, seen = features, []
        for i in range(2):
            tokens = [ids[min(t + 1 + i, len(ids) - 1)] for t in range(len(ids))]
            pairs = [project(torch.cat((embedding[x], s)), w, "fc") for x, s in zip(tokens, states)]
            states = layer_rows(pairs, pairs, config, w, "layers.0.", [t + i for t in range(len(ids))], seen)
            for t in range(len(ids) - 2 - i):
                y = t + 2 + i
                if not marks[y]:
                    continue
                label = y + shift if y + shift < len(ids) else y
                log_q = model.lm_head(states[t]).log_softmax(-1)
                p, q = distribution[label - 1], log_q.exp()
                kl, alpha = (p * (p.log() - log_q)).sum(), torch.minimum(p, q).sum()
                values = {"hard": -log_q[ids[label]], "kl": kl, "lk": kl}
                kls[i] += float(kl)
                alphas[i] += float(alpha)
                likely = p.argsort(descending=True)[:top]
                sums[i, 0] += float(values[name] - 0.7 * (p[likely] * log_q[likely]).sum())
                sums[i, 1] += float(F.smooth_l1_loss(states[t], features[label - 1]))
                counts[i] += 1
    if name == "lk":  # of the second step, which knows the first one's rates of acceptance
        for i in range(2):
            weight = math.exp(-2 * alphas[i] / counts[i])
            sums[i, 0] += (1 - weight) * (counts[i] - alphas[i] - kls[i])
    return sums, counts


@pytest.mark.parametrize(("name", "top"), [("kl", 0), ("hard", 3), ("lk", 10)])
def test_losses_are_those_of_the_formulae_on_unpacked_conversations(
    eagle_arguments, read_metrics, word_target, few, tmp_path, sharp, name, top
):
    """Packing, masks, alignment of features, tokens and distributions, positions, weights and the divisor at once."""
    keys = {"loss": name, "hass_weight": 0.7 if top else 0, "hass_top": top or 10, "token_weight": 0.3}
    keys |= {"feature_weight": 2, "step_decay": 0.6, "noise": 0, "lr": 0, "max_steps": 2, "lk_eta": 2, "data": few}
    run(eagle_arguments, row_length=256, batch_rows=1, **keys)  # all of them are one row
    *_, line = read_metrics()
    sums, counts = by_definition(word_target, few, tmp_path / "run", name, top)
    for i in range(2):
        assert line[f"head{i}_loss"] == pytest.approx(float(sums[i, 0]) / counts[i], rel=2e-5)
        assert line[f"head{i}_feature_loss"] == pytest.approx(float(sums[i, 1]) / counts[i], rel=2e-5)
    total = sum(0.6**i * (0.3 * sums[i, 0] + 2 * sums[i, 1]) for i in range(2)) / counts[0]
    assert line["loss"] == pytest.approx(float(total), rel=2e-5)
    shifted, _ = by_definition(word_target, few, tmp_path / "run", name, top, shift=1)
    assert ((shifted / sums - 1).abs() > 1e-4).all()  # what the bounds above would catch


@pytest.mark.parametrize("mutant", ["tokens early", "tokens late", "labels", "distribution", "positions"])
def test_anything_off_by_one_changes_the_loss(eagle_arguments, read_metrics, tmp_path, monkeypatch, sharp, mutant):
    keys = {"max_steps": 1, "batch_rows": 8, "noise": 0, "loss": "hard" if mutant == "labels" else "kl"}
    run(eagle_arguments, **keys)
    if mutant.startswith("tokens"):
        true, step = head_module.next_tokens, 1 if mutant == "tokens early" else -1
        monkeypatch.setattr(head_module, "next_tokens", lambda ids, n: true(ids, n).roll(step, 1))
    elif mutant == "labels":
        find = loop.find_labels
        monkeypatch.setattr(loop, "find_labels", lambda ids, *rest: find(ids.roll(-1, 1), *rest))
    elif mutant == "distribution":
        distribution = distillation.target_distribution
        monkeypatch.setattr(
            distillation, "target_distribution", lambda logits, *rest: distribution(logits.roll(1, 0), *rest)
        )
    else:
        predict = Eagle.predict

        def scattered(head, features, ids, positions, *rest):
            return predict(head, features, ids, 2 * positions, *rest)

        monkeypatch.setattr(Eagle, "predict", scattered)
    run(eagle_arguments, output=tmp_path / "mutant", **keys)
    right, wrong = read_metrics()[0], read_metrics(run="mutant")[0]
    assert max(abs(wrong[f"head{i}_loss"] / right[f"head{i}_loss"] - 1) for i in range(2)) > 3e-4


def test_every_weight_gets_a_gradient_and_moves_but_the_targets_own(
    eagle_arguments, tmp_path, monkeypatch, counting_target
):
    found, finish_step = {}, loop.finish_step

    def look(head, *rest, **named):
        found.update({name: parameter.grad for name, parameter in head.named_parameters()})
        found["table"] = head.embed_tokens.weight
        return finish_step(head, *rest, **named)

    monkeypatch.setattr(loop, "finish_step", look)
    run(eagle_arguments, target=counting_target, max_steps=1, lr=0, output=tmp_path / "start")
    table = found.pop("table").clone()
    assert found.pop("embed_tokens.weight") is None
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())
    run(eagle_arguments, target=counting_target, lr=0.02)
    assert torch.equal(found.pop("table"), table)
    before, after = head_tensors(tmp_path / "start"), head_tensors(tmp_path / "run")
    assert before.keys() == after.keys() == found.keys() - {"embed_tokens.weight"}
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in before)


def test_trained_head_is_accepted_by_the_engine(eagle_arguments, read_metrics, tmp_path, counting_target):
    keys = {"eval_prompts": 6, "eval_tokens": 16, "num_epochs": 16, "max_steps": 0, "token_weight": 1}
    run(eagle_arguments, lr=0.01, target=counting_target, batch_rows=4, max_grad_value=0, **keys)
    lines = read_metrics()
    for i in range(2):
        assert lines[-1][f"head{i}_loss"] < 0.5 * lines[0][f"head{i}_loss"]
        assert lines[-1][f"head{i}_feature_loss"] < 0.8 * lines[0][f"head{i}_feature_loss"]
    (acceptance,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert acceptance["source"] == saved["source"] == "engine"
    assert acceptance["acceptance_length"] == pytest.approx(1 + sum(acceptance["per_position"]))
    assert len(acceptance["per_position"]) == 3 == load_head(tmp_path / "run").num_speculative_tokens
    assert acceptance["acceptance_length"] > 2.5


def test_neither_chunks_nor_micro_steps_change_the_training(eagle_arguments, read_metrics, tmp_path):
    run(eagle_arguments, batch_rows=8, accumulate=1, max_steps=3)
    run(eagle_arguments, batch_rows=1, accumulate=8, max_steps=3, output=tmp_path / "eight")
    run(eagle_arguments, batch_rows=8, chunk_tokens=7, max_steps=3, output=tmp_path / "chunks")
    for other in ("eight", "chunks"):
        for a, b in zip(read_metrics(), read_metrics(run=other), strict=True):
            assert a == {k: pytest.approx(v, rel=1e-5, abs=1e-6) if type(v) is float else v for k, v in b.items()}
        for name, tensor in head_tensors(tmp_path / "run").items():
            torch.testing.assert_close(head_tensors(tmp_path / other)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("cached", [False, True])
def test_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(eagle_arguments, read_metrics, tmp_path, cached):
    keys = {
        "loss": "lk",  # which hangs on the step before
        "checkpoint_every": 2,
        "keep_checkpoints": 9,
        "eval_every": 3,
        "eval_prompts": 3,
        "eval_tokens": 8,
        "max_steps": 4,
    }
    run(eagle_arguments, cache_features=cached, **keys)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "checkpoints" / "step-000002"
    run(eagle_arguments, cache_features=cached, output=tmp_path / "copy", resume_from=checkpoint, **keys)
    for kind in ("train", "acceptance"):
        assert read_metrics(kind) == read_metrics(kind, run="copy") != []
    one, other = head_tensors(tmp_path / "run"), head_tensors(tmp_path / "copy")
    assert all(torch.equal(one[name], other[name]) for name in one)
    states = [torch.load(list_checkpoints(tmp_path / name)[-1] / "optimizer.pt") for name in ("run", "copy")]
    for index, entry in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][name]) for name, value in entry.items())
    assert_rates_are_those_of_their_step(tmp_path / "run")


def test_noise_is_uniform_as_wide_as_its_document_is_short_and_its_own_in_every_row():
    features = torch.zeros(2, 256, 50)
    document_ids = torch.tensor([[0] * 128 + [1] * 64 + [-1] * 64, [0] * 256])
    noise = eagle.add_noise(features, document_ids, 0.2, [5, 6])
    for part, width in ((noise[0, :128], 0.8), (noise[0, 128:192], 1.6), (noise[1], 0.4)):
        assert part.abs().max() <= width / 2
        assert part.std() == pytest.approx(width / 12**0.5, rel=0.03)
        assert abs(part.mean()) < 0.02 * width
    assert torch.equal(eagle.add_noise(features[1:], document_ids[1:], 0.2, [6])[0], noise[1])
    seeds = [*eagle.noise_seeds(0, 3, range(8)), *eagle.noise_seeds(0, 4, range(8)), *eagle.noise_seeds(1, 3, range(8))]
    assert len(set(seeds)) == 24
    assert eagle.noise_seeds(0, 3, range(4, 8)) == seeds[4:8]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_steps": 9}, "num_steps must be at most 8, got 9"),
        ({"max_grad_norm": 1}, r"max_grad_norm 1\.0 and max_grad_value 0\.5 both cut the gradient"),
        ({"token_weight": 0, "feature_weight": 0}, "both 0: nothing would be learned"),
        ({"loss": "ce"}, "loss must be one of hard, kl, lk, lk-log"),
    ],
)
def test_bad_recipes_are_refused(eagle_arguments, tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        eagle.main(eagle_arguments(**keys))
    assert not (tmp_path / "run").exists()


def test_target_of_another_kind_is_refused(eagle_arguments, tmp_path, word_target):
    config = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=2, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(word_target).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="a gpt2 target's config says no rope_parameters: take a target of the Llama"):
        eagle.main(eagle_arguments(target=tmp_path / "target"))
    assert not (tmp_path / "run").exists()


# ---- every key does something ----

CHANGES = {
    "seed": {"seed": 1},
    "loss": {"loss": "hard"},
    "lr": {"lr": 0.02},
    "beta2": {"beta2": 0.5},
    "max_grad_value": {"max_grad_value": 1e-3},
    "max_grad_norm": {"max_grad_norm": 0.01, "max_grad_value": 0},
    "feature_weight": {"feature_weight": 0.1},
    "token_weight": {"token_weight": 1},
    "hass_weight": {"hass_weight": 1},
    "noise": {"noise": 0},
    "num_steps": {"num_steps": 1},
    "step_decay": {"step_decay": 0.5},
}


def observe(arguments, folder, **keys):
    """All that a run leaves behind, apart from what the clock and the memory decide and from the recipe itself."""
    run(arguments, **({"output": folder, "max_steps": 2} | keys))
    return all_lines(folder), {name: tensor.tolist() for name, tensor in head_tensors(folder).items()}


def test_keys_change_the_run_and_equal_recipes_do_not(eagle_arguments, tmp_path):
    base = observe(eagle_arguments, tmp_path / "base")
    assert observe(eagle_arguments, tmp_path / "again") == base
    for name, keys in CHANGES.items():
        assert observe(eagle_arguments, tmp_path / name, **keys) != base, name
    hass = observe(eagle_arguments, tmp_path / "hass", hass_weight=1)
    assert observe(eagle_arguments, tmp_path / "top", hass_weight=1, hass_top=2) != hass
    own = {f.name for f in fields(eagle.Recipe)} - {f.name for f in fields(eagle.RunRecipe)}
    assert own <= CHANGES.keys() | {"hass_top", "num_speculative_tokens"}


def test_every_field_is_read_by_the_run(eagle_arguments, monkeypatch):
    """Keys that other trainers have too change a run in the tests of train/medusa.py; here they are seen to be asked for."""
    names, seen = {f.name for f in fields(eagle.Recipe)}, set()

    class Watched(eagle.Recipe):
        def __getattribute__(self, name):
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(eagle, "Recipe", Watched)
    keys = {"cache_features": True, "eval_prompts": 4, "eval_tokens": 12, "max_steps": 0, "num_epochs": 0.2}
    run(eagle_arguments, **keys)
    run(eagle_arguments, resume=True, **keys)
    assert names - seen == set()
