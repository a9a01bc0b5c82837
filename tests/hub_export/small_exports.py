"""Exports of a small head of every family, measured on the tiny target, and verify() on them: for the tests of verify."""

import json
import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export import acceptance, export, replay_file, verify
from headstart.hub_export.export import main

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


def edged(head):
    """A block drafter whose edge has learnt something."""
    torch.nn.init.normal_(head.markov_head.markov_w2.weight, std=0.1)
    return head


DSPARK = dict(mask_token_id=7, aux_layer_ids=(0, 1), num_speculative_tokens=3, edge_rank=4, sample_from_anchor=True)
FAMILIES = {
    "medusa": medusa,
    "medusa-shared": partial(medusa, shared=True),
    "mlp-speculator": lambda target: MLPSpeculator(
        MLPSpeculatorConfig(H, V, 16, base_model_name_or_path="some/target")
    ),
    "eagle-vllm": lambda target: deep(Eagle, EagleConfig, target),
    "eagle3": lambda target: deep(Eagle3, Eagle3Config, target, aux_layer_ids=(0, 1, 2), draft_vocab_size=200),
    "dflash": lambda target: edged(deep(BlockHead, BlockConfig, target, **DSPARK)),
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
def in_this_process(monkeypatch):
    """verify() computes in this process, which is faster."""
    monkeypatch.setattr(verify, "in_clean_process", lambda one: json.loads(json.dumps(replay_file.compute_again(one))))
    monkeypatch.setattr(replay_file, "choose_threads_for", lambda *_: None)


@pytest.fixture
def check(in_this_process, tiny_target):
    """verify(): {name of a check: (state, evidence)}."""

    def run(export, target=tiny_target, **options):
        found = verify.verify(export, target and str(target), **options)
        return {one.name: (one.state, one.evidence) for one in found}

    return run


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the Medusa export, to be changed."""
    shutil.copytree(exported("medusa"), tmp_path / "copy")
    return tmp_path / "copy"


def failed(found):
    return {name for name, (state, _) in found.items() if state == verify.FAILED}
