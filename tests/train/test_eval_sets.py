"""Named prompt sets: each is measured for itself, at two temperatures, in first and in later turns."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.evaluation.acceptance import count_by_request
from headstart.heads.checkpoint import load_head
from headstart.heads.families import FAMILIES
from headstart.hub_export.export import main as export
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.train.report.test_dashboard import keys_in_no_panel, titles_of_others, titles_without
from headstart.train.report.dashboard import curves
from headstart.train.report.report import write_report
from headstart.train.run.acceptance import AcceptanceMeter, describe_measurement
from headstart.train.run.tracking import MetricsFile
from headstart.train.teacher.features import FrozenTarget

TOKENS = 8
ONE_TURN = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5 w6 w7 w8"}]
TWO_TURNS = [
    {"role": "user", "content": "w9 w3"},
    {"role": "assistant", "content": "w4 w5 w6"},
    {"role": "user", "content": "w20 w21 w2"},
    {"role": "assistant", "content": "w22 w23 w24 w25"},
]
CODE = [ONE_TURN, TWO_TURNS, [*ONE_TURN, *TWO_TURNS]]
MATH = [TWO_TURNS[2:]]


@pytest.fixture
def eval_data(tmp_path):
    for name, found in (("a", CODE), ("b", MATH)):
        lines = [json.dumps({"messages": messages}) for messages in found]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return f"code={tmp_path / 'a.jsonl'},math={tmp_path / 'b.jsonl'}"


@pytest.fixture
def run(trainer, eval_data):
    return trainer.run(max_steps=2, eval_prompts=4, eval_tokens=TOKENS, eval_data=eval_data)


def lengths(measured):
    return {(one["set"], one["turns"], one["temperature"]): one["acceptance_length"] for one in measured["sets"]}


def test_every_set_has_the_engines_figures_of_its_own_turns(run, word_target):
    """As prompts that the chat template renders, decoded set by set, have them."""
    saved = json.loads((run / "acceptance.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    # In the target's dtype of training: by itself an LLM takes bfloat16 on a CPU that multiplies it.
    llm = LLM(word_target, dtype="float32", speculative_config={"model": str(run / "head"), "tree": "chain"})
    asked = {("code", "first"): [messages[:1] for messages in CODE], ("code", "later"): [m[:-1] for m in CODE[1:]]}
    asked["math", "first"] = [messages[:1] for messages in MATH]
    found, seeds = {}, {("code", "first"): 0, ("code", "later"): 0, ("math", "first"): len(CODE)}
    for (name, turns), requests in asked.items():
        texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in requests]
        for temperature in (0.0, 1.0):
            drawn = [
                SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=seeds[name, turns] + i)
                for i in range(len(texts))
            ]
            steps, *accepted = map(sum, zip(*count_by_request(llm.generate(texts, drawn), 3)))
            found[name, turns, temperature] = pytest.approx(1 + sum(accepted) / steps)
    assert lengths(saved) == found
    first = [one for one in saved["sets"] if (one["turns"], one["temperature"]) == ("first", 0.0)]
    emitted = sum(one["num_steps"] * one["acceptance_length"] for one in first)
    assert saved["num_steps"] == sum(one["num_steps"] for one in first)
    assert saved["acceptance_length"] == pytest.approx(emitted / saved["num_steps"])
    assert [one["num_prompts"] for one in first] == [3, 1]


def test_loss_of_a_set_is_the_kl_on_its_answers(run, word_target):
    saved = json.loads((run / "acceptance.json").read_text())
    target, tokenizer = AutoModelForCausalLM.from_pretrained(word_target), AutoTokenizer.from_pretrained(word_target)
    head, sums = load_head(run / "head"), {}
    for name, conversations in (("code", CODE), ("math", MATH)):
        total = torch.zeros(2, dtype=torch.float64)
        for messages in conversations:
            encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
            ids = torch.tensor([encoded["input_ids"]])
            with torch.no_grad():
                outputs = target(ids, output_hidden_states=True)
                features = outputs.hidden_states[-1]
                predictions = head.predict(features, ids, None, None, target.lm_head.weight)
                logits = [predictions.logits(state, k) for k, state in enumerate(predictions.states)]
            for place in [i for i, marked in enumerate(encoded["assistant_masks"]) if marked]:
                for k in range(min(3, place - 1)):
                    drafted = logits[k][place - 2 - k].log_softmax(-1)
                    kl = F.kl_div(drafted, outputs.logits[0, place - 1].softmax(-1), reduction="sum")
                    total += torch.tensor([kl.double(), 1.0])
        sums[name] = total
    assert saved["set_losses"] == {
        name: pytest.approx((total[0] / total[1]).item(), rel=1e-4) for name, total in sums.items()
    }
    whole = sum(sums.values())
    assert saved["head_loss"] == pytest.approx((whole[0] / whole[1]).item(), rel=1e-4)


def test_every_figure_of_a_set_is_a_curve_and_a_line_of_the_card(run, tmp_path):
    (line,) = (line for line in MetricsFile(run / "metrics.jsonl").lines() if line["kind"] == "acceptance")
    keys = {key for one in MetricsFile(run / "metrics.jsonl").lines() for key in curves(one)}
    assert keys_in_no_panel(keys) == {"train/tokens", "acceptance/num_steps"}
    others = titles_of_others(FAMILIES[0].name, "sets")
    assert titles_without(keys) == others
    assert curves(line)["acceptance/t1/code/later"] == lengths(line)["code", "later", 1.0]
    page = write_report(run).read_text()
    assert all(text in page for text in ("Sets at temperature 1", "code, later", "Held-out loss on each set"))
    assert export([str(run), "--format", "medusa", "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for name, turns in (("code", "first"), ("code", "later"), ("math", "first")):
        cells = [f"{lengths(line)[name, turns, temperature]:.3g}" for temperature in (0.0, 1.0)]
        assert f"| {name}, {turns} turns | {cells[0]} | {cells[1]} |" in card
    assert "| temperature 0 | temperature 1 |" in card
    assert "4 prompts (held-out prompts of the training run)" in card
    assert str(tmp_path) not in card
    told = [json.loads(line)["set"] for line in (run / "heldout.jsonl").read_text().splitlines()]
    assert told == ["code"] * 3 + ["math"]


def test_user_is_told_a_line_for_each_set(run):
    saved = json.loads((run / "acceptance.json").read_text())
    found, (whole, code, math) = lengths(saved), describe_measurement(saved)
    assert whole.startswith(
        f"{saved['acceptance_length']:.2f} tokens per step on held-out prompts, accepted by position "
    )
    assert whole.endswith(f"; loss of the head {saved['head_loss']:.3f}")
    turns = [
        f"{turns} turns {found['code', turns, 0.0]:.2f} at temperature 0 and {found['code', turns, 1.0]:.2f} at temperature 1"
        for turns in ("first", "later")
    ]
    assert code == f"code, tokens per step: {'; '.join(turns)}; loss of the head {saved['set_losses']['code']:.3f}"
    assert "later turns" not in math  # whose conversations have one
    forced = saved | {"source": "teacher_forced", "sets": [{"set": "code", "acceptance_length": 1.25}]}
    forced |= {"set_losses": {"code": 2.5}}
    whole, code = describe_measurement(forced)
    assert "held-out prompts, teacher-forced, accepted" in whole
    assert code == "code, tokens per step: 1.25; loss of the head 2.500"


def test_resumed_run_measures_the_same_sets(trainer, run, eval_data, tmp_path):
    before = (run / "acceptance.json").read_text()
    shutil.rmtree(run / "head")
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    trainer.run(max_steps=2, eval_prompts=4, eval_tokens=TOKENS, eval_data=eval_data, resume=True)
    assert (run / "acceptance.json").read_text() == before


def test_packed_data_are_not_those_of_other_names(trainer, eval_data, tmp_path):
    keys = {"max_steps": 1, "eval_prompts": 4, "eval_tokens": TOKENS, "packed_data": tmp_path / "packed"}
    for name in ("code", "prose"):
        run = trainer.run(**keys, eval_data=eval_data.replace("code", name), output=tmp_path / name)
        assert {one["set"] for one in json.loads((run / "acceptance.json").read_text())["sets"]} == {name, "math"}


def test_target_that_the_engine_does_not_run_has_a_figure_per_set(run, word_target):
    target, tokenizer = AutoModelForCausalLM.from_pretrained(word_target), AutoTokenizer.from_pretrained(word_target)
    named = [
        [messages[0] | {"set": name}, *messages[1:]]
        for name, found in (("code", CODE), ("math", MATH))
        for messages in found
    ]

    def measure(conversations):
        sizes = {"max_tokens": TOKENS, "max_length": 128, "row_length": 64, "chunk_tokens": 64}
        head = load_head(run / "head")
        meter = AcceptanceMeter(
            FrozenTarget(target), head, conversations, source="x", tokenizer=tokenizer, note=print, rules=1, **sizes
        )
        meter.llm = None
        return meter.measure()

    together, code = measure(named), measure(CODE)
    assert "sets" not in code
    [of_code, of_math] = together["sets"]
    assert (of_code["set"], of_code["acceptance_length"]) == ("code", code["acceptance_length"])
    assert together["num_steps"] == of_code["num_steps"] + of_math["num_steps"]
    line = {"kind": "acceptance", "step": 1} | together
    assert curves(line)["acceptance/teacher_forced/code"] == code["acceptance_length"]
    assert keys_in_no_panel(curves(line)) == {"acceptance/num_steps"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("code=a.jsonl,b.jsonl", "'b.jsonl' has no name: write NAME=SOURCE,NAME=SOURCE"),
        ("code=a.jsonl,code=b.jsonl", "gives one name to two sets"),
    ],
)
def test_sets_without_names_of_their_own_are_refused_before_the_data_are_read(trainer, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        trainer.main(data="missing.jsonl", eval_data=given)
    assert not list(tmp_path.iterdir())


def test_set_whose_prompts_are_all_too_long_is_named(trainer, tmp_path, eval_data):
    long = [{"role": "user", "content": "w1 " * 200}, ONE_TURN[1]]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": long}))
    with pytest.raises(ValueError, match="no prompt of eval_data math leaves room for 8 new tokens within 128"):
        trainer.main(max_steps=2, eval_prompts=4, eval_tokens=TOKENS, eval_data=eval_data)
