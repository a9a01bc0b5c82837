"""A LoRA adapter merged while a target is loaded: peft's own merge, the bits of speculation, and adapters that do not fit."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.cli import main as cli
from headstart.heads import checkpoint
from headstart.heads.checkpoint import load_head, save_head, write_head
from headstart.inference.llm import LLM
from headstart.inference.models import adapter as adapter_module, weights
from headstart.inference.models.adapter import find_adapter, fingerprint, read_adapter
from headstart.inference.sampling_params import SamplingParams

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = ["def read(", "once upon a time", "x"]


def make_adapter(target_folder, folder, seed=0, modules=LINEAR, **options):
    """A peft adapter with random A and B, saved as peft saves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=modules, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter_folder(target_folder, tmp_path_factory):
    return make_adapter(target_folder, tmp_path_factory.mktemp("adapters") / "adapter")


@pytest.fixture(scope="module")
def adapted_head(make_target_head, adapter_folder, tmp_path_factory):
    """A head's folder with the adapter beside its weights, as a run of stage joint leaves it."""
    folder = tmp_path_factory.mktemp("adapted") / "head"
    head = make_target_head()
    head.config = replace(head.config, adapter=fingerprint(adapter_folder))
    save_head(head, folder)
    shutil.copytree(adapter_folder, folder / "adapter")
    return folder


def tokens(llm, temperature=0.0):
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [(one.token_ids, one.cumulative_logprob) for one in outputs]


def products(layer):
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_pefts_own_bit_by_bit(target_folder, adapter_folder, dtype):
    base = AutoModelForCausalLM.from_pretrained(target_folder, dtype=getattr(torch, dtype))
    # To merge in bfloat16, peft also reads in bfloat16; the files of this target are float32.
    llm = LLM(target_folder, adapter=adapter_folder, dtype=dtype, device="cpu")
    if dtype == "bfloat16":
        stored = {name: p.bfloat16() for name, p in load_file(target_folder / "model.safetensors").items()}
        folder = adapter_folder.parent / "base-bfloat16"
        shutil.copytree(target_folder, folder)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        llm = LLM(folder, adapter=adapter_folder, dtype=dtype, device="cpu")
    merged = PeftModel.from_pretrained(base, adapter_folder).merge_and_unload()
    expected = LLM(merged).engine.decoder
    for one, other in zip(llm.engine.decoder.layers, expected.layers, strict=True):
        for ours, pefts in zip(products(one), products(other), strict=True):
            assert torch.equal(ours.weight.to_dense(), pefts.weight.to_dense())
    plain = LLM(target_folder, dtype=dtype, device="cpu").engine.decoder
    others = [one.layers[1].mlp.down.weight.to_dense() for one in (plain, llm.engine.decoder)]
    assert not torch.equal(*others)


def test_a_tensor_merged_piece_by_piece_gets_every_row_of_its_change(target_folder, adapter_folder, monkeypatch):
    whole = LLM(target_folder, adapter=adapter_folder, dtype="float32", device="cpu").engine.decoder
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1000)  # 7 rows of 32, 5 of 48
    pieces = LLM(target_folder, adapter=adapter_folder, dtype="float32", device="cpu").engine.decoder
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        for ours, theirs in zip(products(one), products(other), strict=True):
            # A product of fewer rows may add in another order.
            torch.testing.assert_close(ours.weight.to_dense(), theirs.weight.to_dense(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_on_the_adapted_target_writes_what_plain_decoding_of_it_writes(
    target_folder, adapter_folder, adapted_head, temperature
):
    plain = LLM(target_folder, adapter=adapter_folder, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafting = LLM(target_folder, adapter=adapted_head, dtype="float32", speculative_config={"model": adapted_head})
        shared = LLM(plain, speculative_config={"model": adapted_head})
    expected = tokens(plain, temperature)
    assert tokens(drafting, temperature) == expected
    assert tokens(shared, temperature) == expected
    assert tokens(LLM(target_folder, dtype="float32"), temperature) != expected


def test_a_head_without_its_adapter_is_warned_of(target_folder, adapted_head, tmp_path):
    other = make_adapter(target_folder, tmp_path / "other", seed=1)
    speculative = {"model": adapted_head}
    with pytest.warns(UserWarning, match="trained together with the adapter .* and none is in use.*--adapter"):
        llm = LLM(target_folder, dtype="float32", speculative_config=speculative)
    assert tokens(llm) == tokens(LLM(target_folder, dtype="float32"))  # drafts are worse, no output is wrong
    with pytest.warns(UserWarning, match=r"and another one \(\w{16}\) is in use"):
        LLM(target_folder, adapter=other, speculative_config=speculative)


def test_adapters_are_found_where_heads_and_runs_keep_them(adapter_folder, adapted_head, head_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted_head, run / "checkpoints" / "step-000007" / "head")
    assert find_adapter(adapter_folder) == adapter_folder
    assert find_adapter(adapted_head) == adapted_head / "adapter"
    assert find_adapter(run) == run / "checkpoints" / "step-000007" / "head" / "adapter"
    for place, said in ((head_folder, "holds no adapter"), (tmp_path / "absent", "there is no adapter folder")):
        with pytest.raises(ValueError, match=said):
            find_adapter(place)
    with pytest.raises(ValueError, match="no adapter at 'some/where'"):
        find_adapter("some/where")


def edit(folder, tmp_path, **keys):
    """A copy of an adapter with a changed config."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "adapter_config.json").read_text()) | keys
    (copy / "adapter_config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"use_dora": True}, "use_dora = True: only plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"use_qalora": True}, "use_qalora = True"),
        ({"kasa_config": {}}, "kasa_config = {}"),
        ({"r": 4}, r"config.json says rank 4: expected A \[4, in\]"),
        ({"lora_alpha": 0}, "must say lora_alpha, a number above 0, got 0"),
    ],
)
def test_what_is_no_plain_lora_is_refused(adapter_folder, tmp_path, keys, said):
    with pytest.raises(ValueError, match=said):
        read_adapter(edit(adapter_folder, tmp_path, **keys))


def test_adapter_that_came_with_other_weights_of_the_target_is_refused_until_peft_made_it_plain(
    target_folder, tmp_path
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    model = get_peft_model(model, LoraConfig(r=3, target_modules=LINEAR, init_lora_weights="pissa"))
    model.save_pretrained(tmp_path / "start")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "pissa")
    with pytest.raises(ValueError, match=r"init_lora_weights = 'pissa': only plain LoRA .*path_initial_model"):
        LLM(target_folder, adapter=tmp_path / "pissa")
    start = str(tmp_path / "start")
    config = json.loads((tmp_path / "start" / "adapter_config.json").read_text()) | {"init_lora_weights": True}
    (tmp_path / "start" / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=start)
    expected = LLM(model.merge_and_unload()).engine.decoder.layers[1].mlp.down.weight
    found = LLM(target_folder, adapter=tmp_path / "plain", dtype="float32", device="cpu").engine.decoder
    torch.testing.assert_close(found.layers[1].mlp.down.weight.to_dense(), expected.to_dense())


def test_adapter_that_the_weights_hold_already_is_refused(target_folder, adapter_folder, tmp_path, monkeypatch):
    merged, held = tmp_path / "merged", fingerprint(adapter_folder)
    shutil.copytree(target_folder, merged)
    config = json.loads((merged / "config.json").read_text()) | {"merged_adapter": held}
    (merged / "config.json").write_text(json.dumps(config))
    other = make_adapter(target_folder, tmp_path / "other", seed=1)
    on_top = make_adapter(merged, tmp_path / "on_top", seed=2)
    assert LLM(merged, adapter=on_top).adapter == fingerprint(on_top)
    assert LLM(merged).adapter == held
    monkeypatch.setattr(weights, "_allocate", None)  # nothing gets so far
    with pytest.raises(ValueError, match=rf"holds this adapter \({held}\) in its weights already"):
        LLM(merged, adapter=adapter_folder)
    with pytest.raises(ValueError, match=f"holds an adapter .*was made for {target_folder}: leave the adapter out"):
        LLM(merged, adapter=other)


def test_scaling_follows_the_config(adapter_folder, tmp_path):
    assert read_adapter(adapter_folder).scaling == 5 / 3
    assert read_adapter(edit(adapter_folder, tmp_path, use_rslora=True)).scaling == pytest.approx(5 / 3**0.5)


def test_adapters_of_another_target_are_refused_before_its_weights_are_read(
    target_folder, adapter_folder, tmp_path, monkeypatch
):
    tensors = load_file(adapter_folder / "adapter_model.safetensors")
    place = "base_model.model.model.layers.{}.mlp.up_proj.lora_B.weight"

    def changed(name, **changes):
        copy = tmp_path / name
        shutil.copytree(adapter_folder, copy)
        kept = {key: tensor.clone() for key, tensor in (tensors | changes).items() if tensor is not None}
        save_file(kept, copy / "adapter_model.safetensors")
        return copy

    def load(folder):
        LLM(target_folder, adapter=folder)

    monkeypatch.setattr(weights, "_allocate", None)  # nothing gets so far
    wider = changed("wider", **{place.format(0): torch.zeros(50, 3)})
    with pytest.raises(ValueError, match=r"up_proj.weight is \[48, 32\] in the target and \[50, 32\] in the adapter"):
        load(wider)
    deeper = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items() if "layers.1" in name}
    with pytest.raises(ValueError, match=r"the target has no model\.layers\.7\.mlp\.down_proj\.weight"):
        load(changed("deeper", **deeper))
    with pytest.raises(ValueError, match=r"one of A and B is missing of .*layers\.1\.mlp\.up_proj"):
        load(changed("alone", **{place.format(1): None}))
    with pytest.raises(ValueError, match="holds no plain LoRA: it holds strange"):
        load(changed("strange", strange=torch.zeros(1)))
    (tmp_path / "wider" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="cut short or damaged"):
        load(wider)


def test_an_adapter_needs_weights_from_files(target_folder, adapter_folder):
    module = AutoModelForCausalLM.from_pretrained(target_folder)
    for model, options in ((module, {}), (LLM(target_folder), {}), (target_folder, {"load_format": "dummy"})):
        with pytest.raises(ValueError, match="while they are read from files"):
            LLM(model, adapter=adapter_folder, **options)
    with pytest.raises(ValueError, match="adapter must be a folder, a run or a Hub id, got 3"):
        LLM(target_folder, adapter=3)


def test_the_command_decodes_the_adapted_target(target_folder, adapted_head, capsys):
    options = ["--model", str(target_folder), "--adapter", str(adapted_head), "--head", str(adapted_head)]
    assert cli(["generate", *options, "--dtype", "float32", "--max-tokens", "12", "--raw", "--compare", "once"]) == 0
    said = capsys.readouterr().out
    assert "same tokens: yes" in said
    llm = LLM(target_folder, adapter=adapted_head, dtype="float32")
    (plain,) = llm.generate(["once"], SamplingParams(temperature=0.0, max_tokens=12))
    assert said.startswith(plain.outputs[0].text)


def test_a_tree_is_measured_on_the_adapted_target_unless_another_is_named(
    target_folder, adapted_head, tmp_path, monkeypatch
):
    run, seen = tmp_path / "run", []
    shutil.copytree(adapted_head, run / "head")
    (run / "config.yaml").write_text(f"target: {target_folder}\n")
    lines = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))

    class Watched(LLM):
        def __init__(self, *arguments, adapter=None, **options):
            seen.append(adapter)
            super().__init__(*arguments, adapter=adapter, **options)

    monkeypatch.setattr("headstart.inference.llm.LLM", Watched)
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "3", "--budget", "4"]
    assert cli(["tree", str(run), *options]) == 0
    assert cli(["tree", str(run), *options, "--model", str(target_folder), "--adapter", str(adapted_head)]) == 0
    assert seen == [run / "head" / "adapter", str(adapted_head)]


def test_a_tree_of_a_head_from_the_hub_is_measured_with_the_adapter_of_its_repository(
    target_folder, adapted_head, tmp_path, monkeypatch
):
    """Only requested files of a repository arrive, one by one."""
    fetched, seen = tmp_path / "snapshot", []
    head = load_head(adapted_head)
    head.config = replace(head.config, base_model_name_or_path=str(target_folder))
    shutil.copytree(adapted_head / "adapter", tmp_path / "repository" / "adapter")
    write_head(head, tmp_path / "repository", "medusa")

    def download(name, file, revision=None, local_files_only=False):
        assert name == "you/medusa2"
        if not (tmp_path / "repository" / file).exists():
            raise EntryNotFoundError(file)
        (fetched / file).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copyfile(tmp_path / "repository" / file, fetched / file)

    class Measured(Exception):
        pass

    def watch(*_, adapter, **__):
        seen.append(adapter)
        raise Measured

    for module in (checkpoint, adapter_module):
        monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr("headstart.inference.llm.LLM", watch)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "once"}')
    options = [
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--num-prompts",
        "1",
        "--output",
        str(tmp_path / "tree.json"),
    ]
    with pytest.raises(Measured):
        cli(["tree", "you/medusa2", *options])
    assert seen == [fetched / "adapter"]
    assert read_adapter(seen[0]).fingerprint == head.config.adapter


def test_a_tree_of_a_head_that_lost_its_adapter_is_refused(target_folder, adapted_head, tmp_path, capsys):
    shutil.copytree(adapted_head, tmp_path / "head")
    shutil.rmtree(tmp_path / "head" / "adapter")
    (tmp_path / "head" / "config.yaml").write_text(f"target: {target_folder}\n")
    assert cli(["tree", str(tmp_path / "head")]) == 2
    assert "trained with an adapter, and no adapter/ beside them" in capsys.readouterr().err
