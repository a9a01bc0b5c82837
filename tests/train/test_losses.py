"""The loss that a run minimises, for every family: what the formulae say, and not what they say of the token beside."""

import math
from contextlib import contextmanager
from pathlib import Path

import pytest

from headstart.heads.families import FAMILIES
from headstart.tests.train.formulae import losses_by_definition
from headstart.tests.train.tiny_runs import all_lines
from headstart.tests.train.trainings import HEADS, START
from headstart.train.data.packed import row_reader
from headstart.train.loss import distillation

# What a script calls the weight whose power k is that of step k's loss.
DECAYS = {
    "medusa": "head_weight_decay",
    "mlp_speculator": "step_weight_decay",
    "eagle": "step_decay",
    "eagle3": "step_decay",
    "block": "gamma",
}


@pytest.fixture(scope="session")
def few(conversations, tmp_path_factory):
    """A .jsonl of six conversations: two rows of 64 tokens."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("\n".join(Path(conversations).read_text().splitlines()[:6]))
    return str(path)


@contextmanager
def sharp_attention(trainer):
    """New heads attend to some rows far more than to others, so that positions matter."""
    script, name = trainer.script, {"eagle": "Eagle", "eagle3": "Eagle3"}.get(trainer.training.family)
    with pytest.MonkeyPatch.context() as patch:
        if name:
            kind = getattr(script, name)

            def build(config):
                head = kind(config)
                for parameter_name, parameter in head.named_parameters():
                    if parameter_name.endswith(("q_proj.weight", "k_proj.weight")):
                        parameter.data.mul_(8)
                return head

            patch.setattr(script, name, build)
        yield


# ---- what the formulae say ----

CASES = [
    ("plain", {"loss": "kl"}),
    ("medusa", {"loss": "lk", "num_layers": 2, "shared_lm_head": True, "head_weight_decay": 0.7}),
    ("mlp_speculator", {"loss": "kl", "tie_weights": True, "scale_input": True, "step_weight_decay": 0.7}),
    ("mlp_speculator", {"loss": "hard", "tie_weights": False, "scale_input": False, "step_weight_decay": 0.7}),
    ("mlp_speculator", {"loss": "lk", "tie_weights": True, "scale_input": False, "step_weight_decay": 0.7}),
    ("mlp_speculator", {"loss": "lk-log", "tie_weights": False, "scale_input": True, "step_weight_decay": 0.7}),
    ("eagle", {"loss": "kl", "step_decay": 0.6}),
    ("eagle", {"loss": "hard", "step_decay": 0.6, "hass_weight": 0.7, "hass_top": 3}),
    ("eagle", {"loss": "lk", "step_decay": 0.6, "hass_weight": 0.7, "hass_top": 10}),
    ("eagle3", {"loss": "kl", "draft_vocab_size": 20, "step_decay": 0.6}),
    ("eagle3", {"loss": "kl", "draft_vocab_size": 0, "step_decay": 0}),
    ("eagle3", {"loss": "hard", "draft_vocab_size": 20, "step_decay": 1}),
    ("eagle3", {"loss": "lk", "draft_vocab_size": 20, "step_decay": 0.5}),
    ("block", {"loss": "kl", "gamma": 2, "num_anchors": 99}),
    ("block", {"loss": "hard", "gamma": 3, "num_anchors": 99}),
    ("block", {"loss": "lk", "gamma": 1, "num_anchors": 99}),
]
LIKE_A_START = ("num_layers", "shared_lm_head", "tie_weights", "scale_input")


@pytest.mark.parametrize(("steps", "keys"), CASES, ids=lambda given: given["loss"] if type(given) is dict else given)
def test_losses_are_those_of_the_formulae_on_unpacked_conversations(
    trainers, start, read_metrics, word_target, few, capsys, steps, keys
):
    """Packing, masks, alignment of features, streams, tokens and distributions, positions, draft vocabulary, weights and the
    divisor at once, for new heads ("plain": Medusa's, which are still the identity) and for those that a run starts from."""
    family = "medusa" if steps == "plain" else steps
    keys = keys | {"lk_eta": 2, "lr": 0, "max_steps": 2, "data": few}
    if steps in ("medusa", "mlp_speculator"):
        keys["start_from"] = start(family, **{name: keys[name] for name in LIKE_A_START if name in keys})
    if family == "eagle":
        keys |= {"token_weight": 0.3, "feature_weight": 2, "noise": 0}
    if family in ("eagle3", "block"):
        keys |= {"aux_layers": "0,1"}
    if family == "block" and keys["loss"] != "lk":
        keys["start_from"] = start("block")  # with an edge that does something
    with sharp_attention(trainers[family]):
        run = trainers[family].run(batch_rows=2, **keys)
    assert " documents in 2 rows" in capsys.readouterr().err  # so every step is fed all of them, once
    *_, line = read_metrics()
    of_the_loss = {name: keys[name] for name in ("loss", "lk_eta", "hass_weight", "hass_top") if name in keys}
    sums, shifted = losses_by_definition(steps, run, word_target, few, **of_the_loss)
    decay, total = keys.get(DECAYS[family], 0.8), 0.0
    if family == "block":
        decay = math.exp(-1 / decay)
    for k, count in enumerate(sums.counts):
        assert line[f"head{k}_loss"] == pytest.approx(sums.losses[k] / count, rel=1e-5)
        total += decay**k * keys.get("token_weight", 1) * sums.losses[k]
        if family == "eagle":
            assert line[f"head{k}_feature_loss"] == pytest.approx(sums.feature_losses[k] / count, rel=1e-5)
            total += decay**k * 2 * sums.feature_losses[k]
            assert abs(shifted.feature_losses[k] / sums.feature_losses[k] - 1) > 1e-4
        assert abs(shifted.losses[k] / sums.losses[k] - 1) > 1e-4  # what the bounds above would catch
    num_labels = sum(sums.labels) if family == "block" else sums.labels[0]
    assert line["loss"] == pytest.approx(total / num_labels, rel=1e-5)
    assert f"head{len(sums.counts)}_loss" not in line
    assert (sums.counts[0] < sums.labels[0]) == (keys["loss"] == "hard" and "draft_vocab_size" in keys)


# ---- what is off by one ----


def off_by_one(patch, key, mutant):
    """Have runs of the family read or compare something else than they should."""
    if mutant == "labels":
        find = row_reader.find_labels
        patch.setattr(row_reader, "find_labels", lambda ids, *rest: find(ids.roll(-1, 1), *rest))
    elif mutant == "distribution":
        compute = distillation.target_distribution
        patch.setattr(distillation, "target_distribution", lambda logits, *rest: compute(logits.roll(1, 0), *rest))
    else:
        heads = next(family.head for family in FAMILIES if family.key == key)
        predict = heads.predict

        def wrong(head, features, ids, positions, *rest, **named):
            if mutant == "features":
                features = features.roll(1, 1)
            elif mutant == "positions":
                positions = 2 * positions
            else:
                ids = ids.roll(-1 if mutant == "tokens late" else 1, 1)
            return predict(head, features, ids, positions, *rest, **named)

        patch.setattr(heads, "predict", wrong)


FIRST_STEP = {"max_steps": 1, "batch_rows": 8}
MUTANTS = {
    "medusa": ("labels", "distribution", "features"),
    "mlp_speculator": ("labels", "distribution", "features", "tokens early", "tokens late"),
    "eagle": ("labels", "distribution", "features", "tokens early", "tokens late", "positions"),
    "eagle3": ("labels", "distribution", "features", "tokens early", "tokens late", "positions"),
    "block": (),  # tests/train/loss/test_blocks.py
}


def first_losses(trainer, output, **keys):
    """Every step's loss in the first step of a run."""
    with sharp_attention(trainer):
        (line,) = all_lines(trainer.run(**FIRST_STEP, **keys, output=output))
    return [value for name, value in line.items() if name.startswith("head") and name.endswith("_loss")]


@pytest.fixture(scope="module")
def right(make_trainers, tmp_path_factory):
    """right(family, **keys) -> the first losses of a run of nothing but the truth."""
    made = {}

    def right(family, **keys):
        if (family, keys["loss"]) not in made:
            folder = tmp_path_factory.mktemp("right")
            made[family, keys["loss"]] = first_losses(make_trainers(folder)[family], folder / "run", **keys)
        return made[family, keys["loss"]]

    return right


@pytest.mark.parametrize(("family", "mutant"), [(family, mutant) for family in HEADS for mutant in MUTANTS[family]])
def test_anything_off_by_one_changes_the_loss(trainers, right, tmp_path, monkeypatch, family, mutant):
    keys = {"loss": "hard" if mutant == "labels" else "kl"}
    keys |= {"noise": 0} if family == "eagle" else {}
    keys |= {"start_from": START} if family in ("medusa", "mlp_speculator") else {}
    expected = right(family, **keys)
    off_by_one(monkeypatch, family, mutant)
    found = first_losses(trainers[family], tmp_path / "mutant", **keys)
    assert max(abs(wrong / value - 1) for wrong, value in zip(found, expected, strict=True)) > 1e-3
