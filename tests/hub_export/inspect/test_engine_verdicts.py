"""The verdicts of inspect on each engine: its problems are real, and the command that it names mends them."""

import json
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import load_head, save_head
from headstart.hub_export.export import main as export
from headstart.hub_export.inspect_head import as_text, describe
from headstart.hub_export.readers.readers import files_as_written, judge, readers_table
from headstart.tests.hub_export.inspect.small_heads import (
    H,
    V,
    eagle,
    eagle3,
    leave_out,
    medusa,
    mlp_speculator,
    rewrite,
    say,
    untied,
)
from headstart.tests.hub_export.inspect.test_inspect import FAMILIES


def found_in(folder):
    return describe(folder, Path(folder))


def rename(old, new):
    return rewrite(lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()})


def remove(name):
    return lambda folder: (folder / name).unlink()


def engine_of(found, name):
    [engine] = [one for one in found["engines"] if one["name"].removeprefix("the ").startswith(name)]
    return engine


# Faults of files: (head, format, change), reader (None: config.json itself), whether it loads, expected text.
SPOILED = {
    "fewer heads said": (medusa, "medusa", say(medusa_num_heads=2), "text-gen", True, "drafts the 2 heads"),
    "more heads said": (medusa, "medusa", say(medusa_num_heads=4), "text-gen", False, "looks for the 4 heads"),
    "no number said": (medusa, "medusa", say(medusa_num_heads="3"), "text-gen", False, "is '3', which is not a number"),
    "no steps said": (
        lambda: mlp_speculator(tie_weights=False), "mlp-speculator", say(n_predict="3"), "fms", False, "not a number of steps",
    ),
    "no size said": (eagle, "eagle-vllm", say(hidden_size="16"), "vLLM", False, "which says 16 of hidden_size"),
    "architectures": (medusa, "medusa", say(architectures=["X"]), "text-gen", False, "serves without speculation"),
    "no count": (medusa, "medusa", leave_out("medusa_num_heads"), "text-gen", False, "lacks medusa_num_heads"),
    "no target": (medusa, "medusa", leave_out("base_model_name_or_path"), "text-gen", False, "names no target"),
    "no .safetensors": (medusa, "medusa", remove("medusa_lm_head.safetensors"), "text-gen", False, "is not here"),
    "no .pt": (lambda: medusa(5), "medusa", remove("medusa_lm_head.pt"), "original", False, "is not here"),
    "no bias said": (medusa, "vllm", say(medusa_fc_bias=False), "vLLM", True, "drops every bias"),
    "a key for heads": (medusa, "vllm", say(num_attention_heads=8), "vLLM", True, "as many heads as config.json says (8)"),
    "one lm_head said": (medusa, "vllm", say(original_lm_head=True), "vLLM", True, "original_lm_head should be false"),
    "inner_dim 0": (
        lambda: mlp_speculator(inner_size=H, scale_input=False), "mlp-speculator", say(inner_dim=0), "text-gen", True,
        "weighs tokens by inner_dim 0",
    ),
    "no speculator": (
        lambda: mlp_speculator(scale_input=False), "mlp-speculator", leave_out("architectures"), "text-gen", False,
        "serves without speculation",
    ),
    "fc.bias of zeros": (eagle, "eagle-sglang", say(), "vLLM", False, "refuses fc.bias even if it is zero"),
    "no fc.bias": (eagle, "eagle-vllm", say(), "SGLang", False, "stays at random values"),
    "bias said": (eagle, "eagle-vllm", say(bias=True), "vLLM", True, "for a bias of the attention too"),
    "no bias key": (eagle, "eagle-vllm", leave_out("bias"), "original", False, "unless config.json says bias false"),
    "a prefix": (eagle, "eagle-vllm", rename("^", "model."), "vLLM", False, "whose names begin with 'model.'"),
    "layers.0": (eagle3, "eagle3", rename("midlayer.", "layers.0."), "SGLang", False, "draft from random values"),
    "outer ids only": (eagle3, "eagle3", leave_out("eagle_config"), "SGLang", True, "not in eagle_config"),
    "inner ids only": (
        eagle3, "eagle3", leave_out("eagle_aux_hidden_state_layer_ids"), "vLLM", True, "or [0, 3, 5] of eagle_config",
    ),
    "tied": (eagle3, "eagle3", say(tie_word_embeddings=True), "SGLang", True, "embedding in the place of lm_head"),
    "null": (eagle3, "eagle3", say(target_hidden_size=None), "vLLM", False, "target_hidden_size is null"),
    "no draft size": (eagle3, "eagle3", leave_out("draft_vocab_size"), "SGLang", False, f"an lm_head of {V} rows"),
    "new rope only": (eagle3, "eagle3", leave_out("rope_theta"), "vLLM", True, "on transformers 4"),
    "other sizes": (eagle3, "eagle3", say(intermediate_size=8), "vLLM", False, "which says 8 of intermediate_size"),
    "heads in words": (medusa, "medusa", say(medusa_num_heads="three"), "text-gen", False, "medusa_num_heads is 'three'"),
    "steps in words": (untied, "mlp-speculator", say(n_predict="three"), "vLLM", False, "n_predict is 'three'"),
    "size in words": (eagle, "eagle-vllm", say(hidden_size="wide"), "vLLM", False, "says wide of hidden_size"),
    "type in a list": (eagle, "eagle-vllm", say(model_type=["llama"], architectures=[]), "vLLM", False, "it wants"),
    "blocks said": (medusa, "medusa", say(medusa_num_layers=2), "text-gen", False, "as many blocks per head"),
    "not Medusa": (medusa, "vllm", say(architectures=["X"]), "vLLM", False, 'must say "model_type": "medusa"'),
    "a hidden size": (medusa, "vllm", say(hidden_size=8), "vLLM", False, "builds hidden_size 8"),
    "truncated": (medusa, "vllm", say(truncated_vocab_size=7), "vLLM", False, "needs a token_map"),
    "no type": (
        lambda: mlp_speculator(scale_input=False), "mlp-speculator", leave_out("model_type"), "text-gen", False,
        'must say "model_type": "mlp_speculator"',
    ),
    "no inner_dim": (
        lambda: mlp_speculator(inner_size=H, scale_input=False), "mlp-speculator", leave_out("inner_dim"), "text-gen",
        False, "lacks inner_dim",
    ),
    "fewer steps said": (
        lambda: mlp_speculator(tie_weights=False), "mlp-speculator", say(n_predict=2), "fms", True, "drafts 2 steps",
    ),
    "a width": (mlp_speculator, "mlp-speculator", say(emb_dim=8), "fms", False, "builds emb_dim 8"),
    "no qkv_bias": (
        lambda: eagle(attention_bias=True), "eagle-vllm", leave_out("qkv_bias"), "vLLM", False, "refuses the biases",
    ),
    "other architectures": (eagle3, "eagle3", say(architectures=["X"]), "vLLM", False, 'it wants "architectures"'),
    "other architectures there": (
        eagle3, "eagle3", say(architectures=["X"]), "SGLang", False, 'it wants "architectures"',
    ),
    "no fc": (
        eagle3, "eagle3", say(eagle_config={"use_aux_hidden_state": False}), "vLLM", False, "it builds no fc",
    ),
    "no speculators": (eagle3, "eagle3", say(), "speculators", False, "reads the format speculators"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_for_a_reader_is_said_and_mended_by_the_command(tmp_path, case):
    head, format, change, reader, loads, said = SPOILED[case]
    save_head(head(), tmp_path / "head", format=format, torch_file=True)
    change(tmp_path / "head")
    found = found_in("head")
    engine = engine_of(found, reader)
    assert engine["loads"] is loads
    assert any(said in problem for problem in engine["problems"]), engine["problems"]
    assert engine["mend"] in as_text(found)
    command, *arguments = shlex.split(engine["mend"].replace("OWNER/NAME", "target").replace("DIR", "mended"))
    assert command == "heads.export"
    with warnings.catch_warnings(action="ignore"):  # on the config's errors
        assert export(arguments) == 0
    engine = engine_of(found_in("mended"), reader)
    assert (engine["loads"], engine["problems"]) == (True, [])


@pytest.mark.parametrize(
    ("spellings", "noted"), [((), False), (("rope_parameters",), False), (("rope_theta", "rope_parameters"), True)]
)
def test_rope_is_noted_where_neither_spelling_says_it(tmp_path, spellings, noted):
    save_head(eagle3(), tmp_path / "head", format="eagle3")
    for key in spellings:
        leave_out(key)(tmp_path / "head")
    engine = engine_of(found_in("head"), "SGLang")
    assert any("says no rope_theta" in note for note in engine["notes"]) is noted


# Problems that no format mends.
INHERENT = {
    "blocks": (lambda: medusa(3, 2, True), "medusa-shared", "text-gen", False, "one residual block per head"),
    "own blocks": (lambda: medusa(5, 2), "medusa", "original", True, "repeats one residual block 2 times"),
    "five heads": (medusa, "medusa", "original", True, "builds 5 heads whatever the config says: these are 3"),
    "scale_input": (mlp_speculator, "mlp-speculator", "text-gen", True, "takes no notice of scale_input"),
    "fc.bias": (lambda: eagle(fc_bias=True), "eagle-sglang", "vLLM", False, "this head's has one"),
    "wide": (lambda: eagle(head_dim=10), "eagle-vllm", "original", False, "no heads that are not the hidden size"),
    "one step": (lambda: mlp_speculator(num_steps=1), "mlp-speculator", "vLLM", False, "wants two projections"),
    "residual": (lambda: eagle3(norm_before_residual=True), "speculators", "SGLang", False, "norm_before_residual"),
    "layers": (lambda: eagle3(aux_layer_ids=(1, 2, 3, 4)), "eagle3", "vLLM", False, "this head reads 4"),
    "biases": (lambda: eagle3(attention_bias=True), "eagle3", "SGLang", False, "no biases of q, k and v"),
    "family": (eagle, "eagle-vllm", "text-gen", False, "no EAGLE support"),
}


@pytest.mark.parametrize("case", INHERENT)
def test_what_lies_in_the_head_is_said_without_a_command(tmp_path, case):
    head, format, reader, loads, said = INHERENT[case]
    save_head(head(), tmp_path / "head", format=format, torch_file=True)
    engine = engine_of(found_in("head"), reader)
    assert (engine["loads"], engine["mend"]) == (loads, None)
    assert any(said in problem for problem in engine["problems"] or [engine["how"]])
    [row] = [text for name, text in readers_table(load_head("head"), format) if reader in name]
    assert said in row.replace("`", "")


@pytest.mark.parametrize("format", [*FAMILIES, "vllm", "eagle-sglang"])
def test_a_card_judges_the_files_that_are_written(tmp_path, format):
    head = {"vllm": lambda: medusa(3, 2, True), "eagle-sglang": eagle}.get(format, FAMILIES.get(format, [None])[0])()
    save_head(head, tmp_path / "head", format=format, torch_file=True, lm_head_weight=torch.zeros(V, H))
    written = files_as_written(head, format)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written.files == {path.name for path in (tmp_path / "head").iterdir()}
    assert written.tensors == load_file(next((tmp_path / "head").glob("*.safetensors"))).keys()
    assert {key: config[key] for key in written.config} == written.config
    assert judge(written) == judge(replace(written, config=config))
    assert any(verdict.loads for verdict in judge(written))


def test_a_command_can_be_copied_whatever_the_folder_is_called(tmp_path):
    save_head(medusa(5), tmp_path / "my heads" / "head")
    mend = engine_of(found_in("my heads/head"), "vLLM")["mend"]
    assert shlex.split(mend)[1] == "my heads/head"


def test_what_the_config_says_wrong_comes_first(inspect, tmp_path):
    save_head(medusa(5), tmp_path / "head")
    say(medusa_num_heads=2)(tmp_path / "head")
    first, _, title, lie, mend, *_ = inspect("head")[1].splitlines()
    assert first == "head: Medusa, 5 heads of 1 block"
    assert (title, "medusa_num_heads" in lie) == ("wrong", True)
    assert mend.endswith(": heads.export head --format medusa --output DIR")
