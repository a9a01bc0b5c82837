"""A target divided over ranks with FSDP2, read in parts: the whole one's features, and parts that are parts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3MoeConfig

from headstart.train.teacher import fused_target
from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.fused_target import fuse
from headstart.train.teacher.sharded_target import load_sharded
from headstart.train.teacher.stored_tensors import StoredTensors


@pytest.fixture
def tied_target(tmp_path):
    """Folder of a random Llama whose lm_head is its embedding, in two files, with layers that three ranks cannot halve evenly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=20,
        intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path / "tied", max_shard_size="20KB")
    assert len(list((tmp_path / "tied").glob("*.safetensors"))) > 1
    return tmp_path / "tied"


def compare_with_whole(rank, world, folder, dtype):
    model = load_sharded(str(folder), dtype, torch.device("cpu"))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id == [7, 9]
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    target, expected = FrozenTarget(model), FrozenTarget(whole)
    assert (target.is_sharded, expected.is_sharded) == (True, False)
    # The layers are divided, the rest is whole, the lm_head still the embedding.
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert isinstance(parameter, DTensor) == (".layers." in name)
        if ".layers." in name and "norm" not in name:
            assert parameter.to_local().shape[0] <= -(-parameter.shape[0] // world)
    assert target.lm_head.weight is target.embedding
    # Another text per rank; twice, because the second pass runs on weights that were gathered, used and given back; and once with
    # the engine's norms and MLPs, as on a GPU (here their references).
    generator = torch.Generator().manual_seed(rank)
    for engines in (False, False, True):
        if engines:
            assert fuse(model) == fuse(whole) == 13  # of a layer two norms, the attention and the MLP; the last norm
            fused_target.on_triton = lambda x: True
        tokens = torch.randint(0, 50, (2, 9), generator=generator)
        places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0], range(9)])
        documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1], [0] * 9])
        batch = tokens, places, documents, (0, 2, 3)
        with torch.no_grad():
            assert torch.equal(target.features(*batch), expected.features(*batch))
    target.check(tokens[:1], places[:1], documents[:1])


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.bfloat16)])
def test_a_divided_target_gives_the_whole_ones_features(tied_target, assert_on_ranks, world, dtype):
    assert_on_ranks(world, compare_with_whole, tied_target, dtype)


def refuse(rank, world, folder, message):
    with pytest.raises(ValueError, match=message):
        load_sharded(str(folder), torch.float32, torch.device("cpu"))


def test_files_that_do_not_hold_the_modules_are_refused(tied_target, assert_on_ranks, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tied_target, other)
    path = next(path for path in sorted(other.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    tensors = load_file(path)
    tensors["model.last_norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    assert_on_ranks(
        2, refuse, other, r"lack 1 of the \d+ tensors of a LlamaForCausalLM, such as model\.norm\.weight\. "
    )
    for path in other.glob("*.safetensors"):
        path.unlink()
    assert_on_ranks(2, refuse, other, r"holds no \.safetensors")


def test_a_config_of_other_sizes_or_quantised_is_refused(tied_target, assert_on_ranks):
    path = Path(tied_target, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 40}))
    assert_on_ranks(2, refuse, tied_target, r"parts of a LlamaForCausalLM: Size mismatch .*_proj")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    assert_on_ranks(2, refuse, tied_target, "quantised weights, which cannot be divided")


SMALL = dict(vocab_size=50, hidden_size=20, intermediate_size=36, num_hidden_layers=2, num_attention_heads=2)
MIXTURES = {
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_key_value_heads=1, head_dim=10, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12
    ),
}


@pytest.fixture
def save_mixture(tmp_path):
    """save_mixture(model type, by_expert) -> folder of a random one, whose files hold each expert by itself or a layer's as one."""

    def save(kind, by_expert):
        torch.manual_seed(0)
        folder = tmp_path / f"{kind}-{by_expert}"
        model = AutoModelForCausalLM.from_config(MIXTURES[kind])
        model.save_pretrained(folder, save_original_format=by_expert, max_shard_size="20KB")
        names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
        assert any(re.search(r"experts\.1\.", name) for name in names) == by_expert
        assert any(re.search(r"experts\.gate_up_proj", name) for name in names) != by_expert
        return folder

    return save


def compare_experts(rank, world, folder):
    model = load_sharded(str(folder), torch.float32, torch.device("cpu"))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(found, expected[name]), name
    experts = dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    assert isinstance(experts, DTensor)
    assert len(experts.to_local()) <= -(-len(experts) // world)
    rows = torch.tensor([[3, 9, 4, 8, 1, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    with torch.no_grad():
        assert torch.equal(FrozenTarget(model).features(*rows), FrozenTarget(whole).features(*rows))


@pytest.mark.parametrize("by_expert", [True, False])
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_divided_however_files_hold_them(save_mixture, assert_on_ranks, kind, by_expert):
    assert_on_ranks(2, compare_experts, save_mixture(kind, by_expert))


def test_a_rank_may_have_no_expert(save_mixture, assert_on_ranks):
    assert_on_ranks(4, compare_experts, save_mixture("mixtral", True))


def count_reads(rank, world, folder):
    """Of experts, a rank reads its own alone."""
    seen, read = [], StoredTensors.read
    StoredTensors.read = lambda self, name: seen.append(name) or read(self, name)
    load_sharded(str(folder), torch.float32, torch.device("cpu"))
    mine = {0: {0, 1, 2}, 1: {3, 4}}[rank]
    assert {int(re.search(r"experts\.(\d+)\.", name)[1]) for name in seen} == mine
    assert len(seen) == len(set(seen)) == 2 * 3 * len(mine)  # layers, weights


def test_a_rank_reads_its_own_experts(save_mixture, assert_on_ranks):
    assert_on_ranks(2, count_reads, save_mixture("qwen3_moe", True))


def test_a_missing_expert_is_refused(save_mixture, assert_on_ranks):
    folder = save_mixture("qwen3_moe", True)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("model.layers.1.mlp.experts.3.down_proj.weight", None)
        save_file(tensors, path)
    message = (
        r"make a model\.layers\.1\.mlp\.experts\.down_proj of \[4, 20, 12\], and its config\.json says \[5, 20, 12\]"
    )
    assert_on_ranks(2, refuse, folder, message)


def test_a_cut_file_is_named(tied_target, assert_on_ranks):
    path = min(tied_target.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-50])
    assert_on_ranks(2, refuse, tied_target, rf"{path.name} cannot be read: .*copy or download the model again")
