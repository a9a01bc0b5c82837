"""Heads of every family are recognised by their tensors, whatever their config says, and never taken for one another."""

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import checkpoint
from headstart.heads.checkpoint import check_head_fits, find_head, load_head, read_head, save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.families import FAMILIES, check_family, family_of, from_file, native_format, to_file
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.heads.storage.hub_answer import HubAnswer
from headstart.tests.heads.published import LAYOUTS
from headstart.tests.heads.test_checkpoint import H, V, edit_config, llama_config, make_head, same_head
from headstart.train.run.checkpointing import copy_checkpoint, copy_head_folder, load_checkpoint
from headstart.train.run.optimization import build_optimizer, update

ROOT = Path(__file__).resolve().parents[2]


def test_an_mlp_speculator_is_recognised_by_its_tensors(tmp_path):
    head = MLPSpeculator(MLPSpeculatorConfig(H, V, 12, num_steps=2, base_model_name_or_path="some/target"))
    save_head(head, tmp_path / "head")
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"}
    edit_config(tmp_path / "head", model_type="medusa", medusa_num_heads=2)  # a wrong config
    loaded = load_head(tmp_path / "head", dtype="bfloat16")
    assert loaded.config == head.config
    assert same_head(loaded, head.bfloat16())
    check_head_fits(loaded, llama_config())
    with pytest.raises(ValueError, match="vocabulary 37, the target has 99"):
        check_head_fits(loaded, llama_config(vocab_size=99))


def test_a_head_of_another_family_is_named():
    speculator = MLPSpeculator(MLPSpeculatorConfig(H, V, 12))
    check_family(speculator, family_of(speculator))
    with pytest.raises(ValueError, match="a head of the family MLP speculator, expected one of the family Medusa"):
        check_family(speculator, family_of(make_head()))
    with pytest.raises(ValueError, match="a head of the family Medusa, expected one of the family MLP speculator"):
        check_family(make_head(), family_of(speculator))
    with pytest.raises(ValueError, match="a Linear is not a head: expected one of Medusa, MLP speculator"):
        family_of(torch.nn.Linear(2, 2))


def test_formats_of_another_family_are_refused(tmp_path):
    speculator = MLPSpeculator(MLPSpeculatorConfig(H, V, 12))
    with pytest.raises(
        ValueError, match="family MLP speculator has no format 'medusa': expected one of mlp-speculator"
    ):
        save_head(speculator, tmp_path / "head", format="medusa")
    with pytest.raises(ValueError, match="family Medusa has no format 'mlp-speculator': expected one of medusa, "):
        save_head(make_head(), tmp_path / "head", format="mlp-speculator")


def test_heads_are_told_from_targets_by_their_tensors(tmp_path):
    save_head(MLPSpeculator(MLPSpeculatorConfig(H, V, 12)), tmp_path / "run" / "head")
    save_head(make_head(), tmp_path / "vllm", format="vllm")
    assert find_head(tmp_path / "run") == find_head(tmp_path / "run" / "head") == tmp_path / "run" / "head"
    assert find_head(tmp_path / "vllm") == tmp_path / "vllm"
    small = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "target")
    edit_config(tmp_path / "target", model_type="medusa")
    assert find_head(tmp_path / "target") is None
    (tmp_path / "vllm" / "model.safetensors").write_bytes(b"cut")
    assert find_head(tmp_path / "vllm") is None


def test_sharded_heads_are_told_from_sharded_targets(tmp_path):
    for name in ("vLLM's Medusa, sharded", "EAGLE-3, sharded"):
        LAYOUTS[name].write(tmp_path / name)
        assert find_head(tmp_path / name) == tmp_path / name
    small = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4)
    small.tie_word_embeddings = True  # then every name begins with "model.", as those of some heads do
    LlamaForCausalLM(small).save_pretrained(tmp_path / "target", max_shard_size=2000)
    assert (tmp_path / "target" / "model.safetensors.index.json").is_file()
    assert find_head(tmp_path / "target") is None


@pytest.mark.parametrize("name", ["vLLM's Medusa, sharded", "EAGLE-3, sharded", "Medusa, tied blocks"])
def test_every_file_of_a_head_is_fetched_from_the_hub(tmp_path, monkeypatch, name):
    """With a Hub that copies single files, as they are asked for, into an empty cache."""
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    LAYOUTS[name].write(hub)
    cache.mkdir()

    def download(repo_id, file_name, revision=None, local_files_only=False):
        assert repo_id == "some/head"
        assert revision == (None if file_name == "config.json" else "cache"), "the commit that config.json came from"
        if not (hub / file_name).is_file():
            raise LocalEntryNotFoundError(f"no {file_name}")
        return shutil.copy(hub / file_name, cache / file_name)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    file = read_head("some/head")
    assert {path.name for path in cache.iterdir()} == {path.name for path in hub.iterdir()}
    assert same_head(file.head, read_head(hub).head)
    monkeypatch.setattr(checkpoint.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "ask_hub", lambda: HubAnswer("", "the Hub"))
    with pytest.warns(UserWarning, match="did not answer whether some/head has a tree.json"):
        read_head("some/head")
    next(path for path in file.weight_files if path.suffix != ".json").rename(tmp_path / "lost")
    shutil.copytree(cache, hub := tmp_path / "hub-without-one")
    with pytest.raises(ValueError, match="no head at 'some/head'"):
        read_head("some/head")


def test_a_tensor_with_a_prefix_and_without_is_refused():
    head = Eagle3(replace(EAGLE3, draft_vocab_size=EAGLE3.vocab_size))
    tensors, config = to_file(head, "eagle3")
    tensors = {"model." + name: tensor for name, tensor in tensors.items()}
    assert from_file(tensors, config)
    with pytest.raises(ValueError, match=r'holds lm_head.weight both with "model." and without'):
        from_file(tensors | {"lm_head.weight": torch.zeros(V, H)}, config)


def test_weights_of_a_bin_file_are_read_without_running_code(tmp_path):
    save_head(make_head(), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "medusa_lm_head.safetensors")
    (tmp_path / "head" / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    assert same_head(load_head(tmp_path / "head"), make_head())
    torch.save(tensors | {"code": Path}, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read"):
        load_head(tmp_path / "head")


def test_a_run_does_not_go_on_with_heads_of_another_family(tmp_path):
    save_head(make_head(), tmp_path / "head")
    with pytest.raises(ValueError, match="a head of the family Medusa, expected one of the family MLP speculator"):
        load_checkpoint(tmp_path, MLPSpeculator(MLPSpeculatorConfig(H, V, 12)), None, Accelerator(cpu=True))


SIZES = dict(hidden_size=H, vocab_size=V, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
EAGLE3 = Eagle3Config(**SIZES, target_hidden_size=H, draft_vocab_size=9, aux_layer_ids=(0, 1))


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Eagle, EagleConfig(**SIZES)), (Eagle3, EAGLE3), (Eagle3, replace(EAGLE3, norm_before_residual=True))],
)
def test_a_run_goes_on_with_the_targets_embedding(tmp_path, kind, config):
    """The embedding has another dtype than the head, as on a GPU; plain checkpoints leave it out."""
    head = kind(config)
    table = torch.randn(V, H).bfloat16()
    head.take_embedding(table)
    expected = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    optimizer, accelerator = build_optimizer(head, 0.1, 0.9, 0.999), Accelerator(cpu=True)
    given = {"optimizer": optimizer, "accelerator": accelerator, "state": {"step": 1}, "num_kept": 1}
    copy_checkpoint(tmp_path, copy_head_folder(head), **given)()
    saved = load_file(tmp_path / "checkpoints/step-000001/head/model.safetensors")
    assert ("embed_tokens.weight" in saved) == (native_format(head) == "speculators")

    # One step with weight decay: everything moves but the table.
    tokens, positions, documents = torch.randint(V, (1, 5, 2)), torch.arange(5)[None], torch.zeros(1, 5).long()
    if kind is Eagle:
        outputs = [head(torch.randn(1, 5, H), tokens[..., 0], positions, documents)]
    else:
        outputs = [head.logits(state) for state in head(torch.randn(1, 5, 2 * H), tokens, positions, documents, 2)]
    sum(output.square().sum() for output in outputs).backward()
    update(head, optimizer, lr=0.1, max_norm=0.0)
    moved = {name for name, tensor in head.state_dict().items() if not torch.equal(tensor, expected[name])}
    assert moved == {*expected} - {"embed_tokens.weight", "d2t", "t2d"}
    load_checkpoint(tmp_path / "checkpoints" / "step-000001", head, optimizer, accelerator)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in head.state_dict().items())
    assert head.embed_tokens.weight.data_ptr() == table.data_ptr()


OWN = ("heads", "heads/formats", "inference/speculation/drafters", "hub_export/readers", "train")


def test_nobody_else_asks_for_a_family():
    """Not by its class, its modules, its key or its name. (Benchmarks measure heads by name.)"""
    words = {text for family in FAMILIES for text in (family.key, family.name)} - {"block"}  # also a rule of verifiers
    classes, keys = ({family.head.__name__ for family in FAMILIES}, {family.key for family in FAMILIES})
    own = {f"{room}/{key}.py" for room in OWN for key in keys} | {"heads/families.py"}
    for room in ("kernels", "heads", "inference", "evaluation", "train", "hub_export", "commands"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.relative_to(ROOT).as_posix() in own or path.parent.name == "bench":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                where = f"{path}, line {getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Compare):
                    inside = [one for side in (node.left, *node.comparators) for one in ast.walk(side)]
                    assert not {one.value for one in inside if isinstance(one, ast.Constant)} & words, where
                elif isinstance(node, ast.Dict):
                    assert not {key.value for key in node.keys if isinstance(key, ast.Constant)} & words, where
                elif isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[-1] not in keys, where
                    assert not classes & {alias.name for alias in node.names}, where
