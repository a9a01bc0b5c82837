"""heads.export of heads that were trained together with an adapter of their target: beside them in peft's format, or merged."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export import acceptance, export, provenance, verify
from headstart.hub_export.export import main
from headstart.inference.llm import LLM
from headstart.inference.models import adapter, weights
from headstart.inference.models.adapter import fingerprint
from headstart.inference.sampling_params import SamplingParams


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request, tiny_target, tmp_path_factory):
    """The tiny target in two shards, in either dtype."""
    folder = tmp_path_factory.mktemp("base") / "target"
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=getattr(torch, request.param))
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for path in tiny_target.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture
def run(base, tmp_path):
    """A run whose head was trained with an adapter of `base`."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    head = Medusa(MedusaConfig(32, model.config.vocab_size, 2, 1, True, str(base), fingerprint(tmp_path / "adapter")))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_head(head, tmp_path / "run" / "head")
    shutil.move(tmp_path / "adapter", tmp_path / "run" / "head" / "adapter")
    return tmp_path / "run"


def tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = [out.outputs[0] for out in llm.generate(["a class", "def f(x", "import"], params)]
    return [(one.token_ids, one.cumulative_logprob) for one in outputs]


@pytest.mark.parametrize("format", ["medusa-shared", "vllm"])
def test_the_adapter_goes_along_and_peft_reads_it(run, base, tmp_path, capsys, format):
    output = tmp_path / "export"
    assert main([str(run), "--format", format, "--output", str(output), "--base-model", str(base)]) == 0, (
        capsys.readouterr()
    )
    assert load_head(output).config == load_head(run).config
    ids = torch.arange(5, 25)[None]
    logits = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)(input_ids=ids).logits
        for folder in (output / "adapter", run / "head" / "adapter")
    ]
    assert torch.equal(*logits)
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits, logits[0])
    card = (output / "README.md").read_text()
    assert "They belong to the adapted target" in card
    assert f'adapter="{output.name}"' in card
    assert f"--adapter {output.name} --head {output.name}" in card


def test_base_model_is_named_by_head_and_adapter_alike(run, tmp_path):
    output = tmp_path / "export"
    assert main([str(run), "--format", "medusa-shared", "--output", str(output), "--base-model", "some/target"]) == 0
    named = [json.loads((output / name).read_text()) for name in ("config.json", "adapter/adapter_config.json")]
    assert [one["base_model_name_or_path"] for one in named] == ["some/target", "some/target"]
    source = run / "head" / "adapter" / "adapter_model.safetensors"
    assert (output / "adapter" / source.name).read_bytes() == source.read_bytes()


def test_merged_target_decodes_bit_by_bit_as_the_adapter_at_load(run, base, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1000)  # several pieces per tensor
    dtype = str(json.loads((base / "config.json").read_text())["dtype"])
    output, merged = tmp_path / "export", tmp_path / "merged"
    assert main([str(run), "--format", "medusa-shared", "--output", str(output), "--merge-adapter", str(merged)]) == 0
    names = {path.name for path in merged.iterdir()}
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"} <= names
    # Other readers take it as a model, and only the adapted tensors differ.
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (base, merged))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 14
    assert all(after[name].dtype == before[name].dtype for name in before)
    card = (merged / "README.md").read_text()
    assert "used as they are, with no adapter beside them" in card
    with pytest.raises(ValueError, match="in its weights already"):
        LLM(merged, adapter=output)
    recwarn.clear()
    expected = tokens(LLM(base, adapter=output, dtype=dtype))
    assert tokens(LLM(merged, dtype=dtype)) == expected
    assert tokens(LLM(merged, dtype=dtype, speculative_config={"model": output})) == expected
    assert not [
        one for one in recwarn if "adapter" in str(one.message)
    ]  # the merged target says whose adapter it holds
    assert tokens(LLM(base, dtype=dtype)) != expected


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(run, base, tmp_path, capsys, monkeypatch):
    output, merged = tmp_path / "export", tmp_path / "merged"
    arguments = [str(run), "--format", "medusa-shared", "--output", str(output), "--merge-adapter", str(merged)]

    def refused(said, changed=arguments):
        assert main(changed) == 2
        assert said in capsys.readouterr().err
        assert not output.exists()

    for inside, outside in ((output, output), (merged / "head", merged), (output, output / "x" / "merged")):
        refused("lie in one another", [*arguments[:4], str(inside), "--merge-adapter", str(outside)])
        assert not merged.exists()
    refused("give --base-model", [*arguments, "--base-model", "no/where"])
    held = tmp_path / "held"
    shutil.copytree(base, held)
    config = json.loads((held / "config.json").read_text()) | {"merged_adapter": fingerprint(run / "head" / "adapter")}
    (held / "config.json").write_text(json.dumps(config))
    refused("in its weights already", [*arguments, "--base-model", str(held)])
    merged.mkdir()
    (merged / "mine").touch()
    refused("already holds mine")
    shutil.rmtree(merged)
    with monkeypatch.context() as patch:
        patch.setattr(
            provenance, "save_file", lambda t, path, metadata: save_file({k: v + 1 for k, v in t.items()}, path)
        )
        refused("read back differs")
    assert not merged.exists()
    with monkeypatch.context() as patch:
        patch.setattr(provenance.torch, "cat", lambda pieces: pieces[0] * float("nan"))
        refused("not finite once the adapter is merged")
    assert not merged.exists()
    other = tmp_path / "other"
    shutil.copytree(base, other)
    for path in other.glob("*.safetensors"):
        save_file({name.replace("layers.1", "layers.0x"): t for name, t in load_file(path).items()}, path)
    refused("does not fit this target: the target has no model.layers.1", [*arguments, "--base-model", str(other)])
    shutil.rmtree(run / "head" / "adapter")
    refused("no adapter/ beside them")
    head = load_head(run)
    head.config = replace(head.config, adapter="")
    shutil.rmtree(run / "head")
    save_head(head, run / "head")
    refused("were trained without an adapter")


def test_adapter_of_a_head_on_the_hub_is_fetched_from_there(run, base, tmp_path, monkeypatch):
    """resolve_head fetches only the head's own files."""
    snapshot, asked = tmp_path / "snapshot", []
    shutil.copytree(run / "head", snapshot, ignore=shutil.ignore_patterns("adapter"))
    monkeypatch.setattr(export, "resolve_head", lambda source: snapshot)

    def find(source):
        asked.append(source)
        return run / "head" / "adapter"

    monkeypatch.setattr(adapter, "find_adapter", find)
    assert main(["you/medusa2", "--format", "medusa-shared", "--output", str(tmp_path / "export")]) == 0
    assert asked[0] == "you/medusa2@snapshot"  # the commit, which the cache's folder is called by
    assert (tmp_path / "export" / "adapter" / "adapter_model.safetensors").is_file()


def test_adapted_heads_are_measured_and_verified_with_their_adapter(run, base, tmp_path, monkeypatch, in_this_process):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a class", "def f(x", "import")))

    monkeypatch.setattr(export, "measure_acceptance", partial(acceptance.measure, max_tokens=12))
    output = tmp_path / "export"
    arguments = [str(run), "--format", "medusa-shared", "--output", str(output), "--prompts", str(prompts)]
    assert main([*arguments, "--measure"]) == 0
    found = {one.name: one for one in verify.verify(output, str(base))}
    assert {one.state for one in found.values()} == {verify.OK}
    shutil.rmtree(output / "adapter")  # the target is then not the one that the heads were trained with
    found = {one.name: one for one in verify.verify(output, str(base))}
    assert "adapter/adapter_model.safetensors missing" in found["files"].evidence
    assert "another target, or another revision" in found["outputs, target's features"].evidence
