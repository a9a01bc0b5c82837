"""heads.export verify on figures: those of card and runs must follow from the counts, and the counts are measured again."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export import acceptance, verify
from headstart.hub_export.acceptance import disagreements, intervals, pool
from headstart.hub_export.export import main
from headstart.tests.hub_export.small_exports import PROMPTS, H, V, failed, medusa


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
            "the card's value of acceptance length at temperature 0 is not a number (None)",
        ),
        (
            lambda metric: metric["args"].update(temperature="warm"),
            "the card's temperature of acceptance length is not a number ('warm')",
        ),
        (
            lambda metric: metric["args"].update(temperature=None),
            "the card's temperature of acceptance length is not a number (None)",
        ),
        (lambda metric: metric.update(value=10**400), "temperature 0 is not a number that fits (1000"),
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
        ("[license, mit]", "the front matter of README.md is not a mapping"),
        ("a: [", "the front matter of README.md is not YAML"),
        ("a: 2026-13-45", "the front matter of README.md is not YAML"),
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
    from headstart.hub_export.acceptance import acceptance_table

    body = card[card.index("# copy" if "# copy" in card else "# medusa") :]
    start, end = body.index("Acceptance, measured"), body.index("Speed:")
    (copy / "README.md").write_text(body[:start] + acceptance_table([figure], [None]) + "\n\n" + body[end:])
    found = check(copy)
    assert told[0] < 2.5
    assert {"card", "acceptance at temperature 0"} <= failed(found)  # the model-index is gone with the front matter
    assert "acceptance length 3.000 is claimed" in found["acceptance at temperature 0"][1]


def test_figures_that_are_not_those_of_their_counts_are_named(copy, check):
    stored = json.loads((copy / "replay.json").read_text())
    stored["acceptance"][1]["acceptance_length"] += 0.5
    (copy / "replay.json").write_text(json.dumps(stored))
    found = check(copy, target=None)
    assert failed(found) == {"figures", "card"}
    assert found["figures"][1] == "those at temperature 0.8 are not those of their own counts"


def test_what_cannot_be_measured_is_refused_before_anything_is_written(tiny_target, tmp_path, capsys):
    save_head(Medusa(MedusaConfig(16, V, 2)), tmp_path / "source")
    (tmp_path / "empty.jsonl").write_text("")
    arguments = [str(tmp_path / "source"), "--format", "medusa", "--output", str(tmp_path / "out"), "--measure"]
    for more, said in (
        ([], "give --measure TARGET"),
        ([str(tmp_path / "source")], "holds a head, not a target"),
        ([str(tiny_target)], "hidden size 16, the target has 32"),
    ):
        assert main([*arguments, *more]) == 2
        assert said in capsys.readouterr().err
    save_head(Medusa(MedusaConfig(H, V, 2)), tmp_path / "fits")
    more = [str(tiny_target), "--prompts", str(tmp_path / "empty.jsonl")]
    assert main([str(tmp_path / "fits"), *arguments[1:], *more]) == 2
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
    assert "acceptance length 2.900 is claimed" in found[1]


def test_intervals_hold_the_pooled_figure_and_grow_narrow_with_more_requests():
    dice = torch.Generator().manual_seed(0)
    counts = [[10, int(torch.randint(2, 9, (), generator=dice)), 1] for _ in range(64)]
    figure = pool(counts)
    assert figure["acceptance_length"] == pytest.approx(1 + sum(one[1] + one[2] for one in counts) / 640)
    widths = [high - low for low, high in (intervals(counts[:8])[0], intervals(counts)[0])]
    assert widths[1] < widths[0] / 2
    assert disagreements(figure, counts) == []
    [said] = disagreements(figure | {"per_position": [figure["per_position"][0], 0.3]}, counts)
    assert said.startswith("position 2 0.300 is claimed")


def test_a_token_more_or_less_at_a_rare_position_is_no_disagreement():
    """One of 800 steps was accepted at this depth, on another machine none: all resampled counts are zero."""
    figure = pool([[50, 20, 1]] + [[50, 20, 0]] * 15)
    assert disagreements(figure, [[50, 20, 0]] * 16) == []
    [said] = disagreements(pool([[50, 20, 1]] * 16), [[50, 20, 0]] * 16)
    assert said.startswith("position 2 0.020 is claimed")
