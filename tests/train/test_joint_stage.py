"""Stage joint of train/medusa.py (Medusa-2): heads and a LoRA adapter of the target, trained together.

The loss and the adapter: loss/test_joint.py. In four processes: test_many_processes.py.
"""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import load_head
from headstart.inference.llm import LLM
from headstart.inference.models.adapter import read_adapter
from headstart.inference.sampling_params import SamplingParams
from headstart.tests.train.tiny_runs import all_lines, assert_same_tensors, head_tensors


def test_measuring_leaves_the_training_as_it_is(trainers, tmp_path):
    keys = {"max_steps": 4, "eval_prompts": 3, "eval_tokens": 6, "lora_dropout": 0.3}  # which draws in every step
    measured = trainers["joint"].run(**keys, eval_every=1, output=tmp_path / "measured")
    other = trainers["joint"].run(**keys, eval_every=0)
    assert all_lines(measured, "train") == all_lines(other, "train")
    assert_same_tensors(head_tensors(measured), head_tensors(other))
    assert len(all_lines(measured, "acceptance")) == 4


def test_run_learns_and_says_what_became_of_the_target(trainers, counting_target, read_metrics):
    """On a target that counts: the loss falls, and the adapted target's own loss stays near the frozen one's."""
    keys = {"target": counting_target, "max_steps": 40, "eval_prompts": 4, "eval_tokens": 8, "batch_rows": 4}
    run = trainers["joint"].run(**keys, lr=0.02)
    lines = read_metrics()
    assert sum(line["loss"] for line in lines[-5:]) < 0.7 * sum(line["loss"] for line in lines[:5])
    assert lines[0]["target_loss"] == pytest.approx(0, abs=1e-6)  # the adapter starts as the identity
    assert lines[5]["target_loss"] > 1e-6
    (measured,) = read_metrics("acceptance")
    saved = json.loads((run / "acceptance.json").read_text())
    assert saved["heldout_loss"] == measured["heldout_loss"] != measured["frozen_heldout_loss"]
    assert saved["heldout_tokens"] > 10
    assert measured["heldout_loss"] < 1.1 * measured["frozen_heldout_loss"] + 0.1
    assert measured["source"] == "engine"


def test_peft_reads_the_adapter_and_the_engine_decodes_as_the_meter_did(trainers, word_target):
    """The final measurement's own samples come back from an engine that loads head and adapter from the run's files."""
    run = trainers["joint"].run(
        max_steps=6, eval_prompts=4, eval_tokens=8, lr=0.05, target_lr=0.05, target_dtype="float32"
    )
    adapter = read_adapter(run)
    assert load_head(run).config.adapter == adapter.fingerprint
    frozen = AutoModelForCausalLM.from_pretrained(word_target)
    weights = {name: p.clone() for name, p in frozen.named_parameters()}
    merged = PeftModel.from_pretrained(frozen, run / "head" / "adapter").merge_and_unload()
    for name, weight in merged.named_parameters():
        assert torch.equal(weight, adapter.add_to(name, weights[name], 0))
    assert sum(not torch.equal(weight, weights[name]) for name, weight in merged.named_parameters()) == 14
    saved = json.loads((run / "acceptance.json").read_text())
    llm = LLM(word_target, adapter=run, dtype="float32", speculative_config={"model": run})
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([sample["prompt"] for sample in saved["samples"]], params)
    assert [output.outputs[0].text for output in outputs] == [sample["output"] for sample in saved["samples"]]
