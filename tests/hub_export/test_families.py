"""heads.export writes heads of every family in all of its formats, and the card lists the readers of each."""

import ast
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.families import FAMILIES
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.hub_export.export import main
from headstart.hub_export.readers.readers import ALIKE, APART, DIALECTS, Reader, rules_of
from headstart.hub_export.replay import compare_with_source
from headstart.tests.heads.test_eagle import SHAPE

H, V = SHAPE["hidden_size"], SHAPE["vocab_size"]
TARGET = {"base_model_name_or_path": "some/target"}
EAGLE3 = SHAPE | TARGET | dict(target_hidden_size=20, draft_vocab_size=11, aux_layer_ids=(1, 3, 5))
BLOCK = SHAPE | TARGET | dict(num_hidden_layers=2, mask_token_id=V - 1, aux_layer_ids=(1, 3), num_speculative_tokens=3)
HEADS = {
    "mlp-speculator": lambda: MLPSpeculator(MLPSpeculatorConfig(H, V, 12, **TARGET)),
    "eagle-vllm": lambda: Eagle(EagleConfig(**SHAPE, **TARGET)),
    "eagle-sglang": lambda: Eagle(EagleConfig(**SHAPE, **TARGET)),
    "eagle3": lambda: Eagle3(Eagle3Config(**EAGLE3)),
    "speculators": lambda: Eagle3(Eagle3Config(**EAGLE3 | {"norm_before_residual": True})),
    "dflash": lambda: BlockHead(BlockConfig(**BLOCK)),
    "dflash-dspark": lambda: BlockHead(BlockConfig(**BLOCK | DSPARK)),
    "dflash-dflash2": lambda: BlockHead(BlockConfig(**BLOCK | DFLASH2)),
    "dflash-convolutions": lambda: BlockHead(BlockConfig(**BLOCK | dict(conv_kernel_size=2, conv_group_size=2))),
}
DSPARK = dict(edge_rank=3, confidence=True, sample_from_anchor=True, draft_vocab_size=11)
DFLASH2 = dict(selector_rank=3, selector_top_k=4, conv_kernel_size=2, conv_group_size=2)
SAID = {
    "mlp-speculator": [
        "| text-generation-inference | yes, but it takes no notice of `scale_input`",
        "| vLLM | to 0.9 |",
    ],
    "eagle-vllm": ["| vLLM | yes |", "An EAGLE head", '"method": "eagle"'],
    "eagle-sglang": ["| SGLang | yes |", "| vLLM | not this dialect: export with `--format eagle-vllm` |"],
    "eagle3": [
        "| draft vocabulary | 11 |",
        "| reads what enters the target's layers | 1, 3, 5 |",
        '"method": "eagle3"',
    ],
    "dflash": [
        "A DFlash block drafter",
        "drafts 3 tokens ahead",
        "| reads what enters the target's layers | 1, 3 |",
        "| block | 4 tokens, not causal |",
        "| z-lab's code | yes |",
        "| text-generation-inference | no DFlash support |",
    ],
    "dflash-dspark": [
        "A DSpark block drafter",
        "| block | 3 tokens, not causal, the first slot predicts too |",
        f"| logits | its own lm_head over 11 of {V} tokens |",
        "| edge | of rank 3, from the token before |",
        "| confidence | from the state and the token before |",
        "| z-lab's code | yes, but it passes over the edge and drafts by the slots alone; it takes slot i for",
        "| vLLM | yes |",
        "These files hold a copy of the lm_head of the target",
    ],
    "dflash-dflash2": [
        "A DFlash2 block drafter",
        "| selector | of rank 3, among 4 tokens by the token before |",
        "| convolutions | over 2 slots, corrections shared by 2 channels |",
        "| z-lab's code | yes |",
        "| vLLM | yes |",
    ],
    "dflash-convolutions": [
        "| vLLM | no: it builds both of DFlash2's parts, and this head has convolutions alone",
        "| SGLang | yes |",
    ],
    "speculators": ["| SGLang | no: it knows no `norm_before_residual`, which is true here |"],
}


def format_of(name):
    """The format of a name of HEADS."""
    return "dflash" if name.startswith("dflash") else name


@pytest.mark.parametrize("format", HEADS)
def test_every_format_is_exported_and_read_back(tmp_path, capsys, format):
    torch.manual_seed(0)
    head, said_of = HEADS[format](), SAID[format]
    format = format_of(format)
    save_head(head, tmp_path / "source")
    arguments = [str(tmp_path / "source"), "--format", format, "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(arguments) == 0, capsys.readouterr().err
    loaded = load_head(tmp_path / "out")
    assert loaded.config == head.config
    expected = head.bfloat16().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    text = (tmp_path / "out" / "README.md").read_text()
    for said in (*said_of, "`some/target`", f"| format | `{format}` |", "| Headstart | yes |"):
        assert said in text
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    ast.parse(code)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.key)
def test_every_family_has_readers_of_all_its_formats(family):
    rules = rules_of(family)
    assert all(isinstance(reader, Reader) and bool(reader.rule) != bool(reader.without) for reader in rules.READERS)
    only_read = {"deepspec"} if family.key == "block" else set()
    assert {format for reader in rules.READERS for format in reader.formats} == {*family.formats.FORMATS} | only_read
    assert rules.FORMATS_ARE in (DIALECTS, ALIKE, APART)
    assert isinstance(rules.FROM_LM_HEAD, bool)
    answers = ("in_card", "title", "features", "tables")
    assert [name for name in answers if not callable(getattr(rules, name))] == []


@pytest.mark.parametrize("format", ["eagle-vllm", "eagle3", "dflash"])
def test_a_head_without_its_embedding_is_exported_without(tmp_path, format):
    head = Eagle3(Eagle3Config(**EAGLE3 | {"target_hidden_size": H})) if format == "eagle3" else HEADS[format]()
    head.embed_tokens = None
    save_head(head, tmp_path / "source")
    assert main([str(tmp_path / "source"), "--format", format, "--output", str(tmp_path / "out")]) == 0
    assert load_head(tmp_path / "out").needs_embedding
    assert head.needs_embedding


@pytest.mark.parametrize("format", HEADS)
def test_what_reads_back_differently_is_no_export(tmp_path, format):
    head, format = HEADS[format](), format_of(format)
    save_head(head, tmp_path / "out", format=format)
    compare_with_source(tmp_path / "out", head, format)
    with torch.no_grad():
        next(parameter for parameter in head.parameters() if parameter.requires_grad)[0, 0] += 1
    with pytest.raises(ValueError, match="read back differs from what was written"):
        compare_with_source(tmp_path / "out", head, format)


def test_speculators_files_take_the_embedding_from_the_target(tmp_path, capsys):
    target = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(target)
    model.save_pretrained(tmp_path / "target")
    head = Eagle3(Eagle3Config(**EAGLE3 | {"target_hidden_size": H, "base_model_name_or_path": ""}))
    head.take_embedding(model.get_input_embeddings().weight)
    save_head(head, tmp_path / "source")
    arguments = [str(tmp_path / "source"), "--format", "speculators", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert (
        "'speculators' stores a part of the target, and the head names no target: give --base-model"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--base-model", str(tmp_path / "target")]) == 0
    assert torch.equal(load_head(tmp_path / "out").embed_tokens.weight, model.get_input_embeddings().weight)
    said = "These files hold a copy of the embedding of the target, to which the target's licence applies."
    again = [str(tmp_path / "out"), "--format", "speculators", "--output", str(tmp_path / "again")]
    assert main(again) == 0
    assert all(said in (tmp_path / name / "README.md").read_text() for name in ("out", "again"))
    assert main([*again[:2], "eagle3", "--output", str(tmp_path / "plain")]) == 0
    assert said not in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.parametrize("parts", [dict(edge_rank=3, sample_from_anchor=True), DFLASH2], ids=["dspark", "dflash2"])
def test_speculators_files_of_block_drafters_take_both_tables_from_the_target(tmp_path, parts, in_this_process):
    target = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=4, num_attention_heads=4)
    model = LlamaForCausalLM(target)
    model.save_pretrained(tmp_path / "target")
    head = BlockHead(BlockConfig(**BLOCK | parts))
    weight = next(
        weight for name, weight in head.named_parameters() if name.endswith(("markov_w2.weight", "successor_codebook"))
    )
    torch.nn.init.normal_(weight)
    save_head(head, tmp_path / "source")
    for source, format in (("source", "speculators"), ("speculators", "dflash")):
        arguments = [str(tmp_path / source), "--format", format, "--output", str(tmp_path / format)]
        assert main([*arguments, "--base-model", str(tmp_path / "target")]) == 0
        assert main(["verify", str(tmp_path / format), "--model", str(tmp_path / "target")]) == 0
        loaded = load_head(tmp_path / format)
        assert (loaded.uses_target_lm_head, loaded.needs_embedding) == (True, format == "dflash")
        assert any(torch.equal(one, weight) for one in loaded.parameters())
    tensors = load_file(tmp_path / "speculators" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(tensors["embed_tokens.weight"], model.model.embed_tokens.weight)
    card = (tmp_path / "speculators" / "README.md").read_text()
    assert "These files hold a copy of the lm_head and of the embedding of the target" in card
    assert "| the `speculators` library | yes" in card
    assert "hold a copy" not in (tmp_path / "dflash" / "README.md").read_text()
