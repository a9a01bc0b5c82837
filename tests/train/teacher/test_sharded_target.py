"""A target divided over ranks with FSDP2, read in parts: the whole one's features, and parts that are parts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from headstart.train.teacher import fused_target
from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.fused_target import fuse
from headstart.train.teacher.sharded_target import load_sharded


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
            assert fuse(model) == fuse(whole) == 10  # two norms and an MLP a layer, and the last norm
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


def test_a_config_of_other_sizes_is_refused(tied_target, assert_on_ranks):
    path = Path(tied_target, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 40}))
    assert_on_ranks(2, refuse, tied_target, r"parts of a LlamaForCausalLM: Size mismatch .*_proj")


def follow_the_refusal(rank, world, folder, rewritten):
    """Rank 0 writes the folder as the error says; then every rank reads its part."""
    with pytest.raises(ValueError, match=r"such as model\.layers\.0\.mlp\.experts\.\w+_proj\. ") as refused:
        load_sharded(str(folder), torch.float32, torch.device("cpu"))
    if rank == 0:
        (call,) = re.findall(r"(AutoModelForCausalLM\.\S+ .*?\)), and AutoTokenizer", str(refused.value))
        eval(call, {"AutoModelForCausalLM": AutoModelForCausalLM, "FOLDER": rewritten})
    dist.barrier()
    target = FrozenTarget(load_sharded(str(rewritten), torch.float32, torch.device("cpu")))
    experts = dict(target.model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert isinstance(experts, DTensor)
    expected = FrozenTarget(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    rows = torch.tensor([[3, 9, 4, 8, 1, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert torch.equal(target.features(*rows), expected.features(*rows))


def test_fused_experts_are_refused_with_a_remedy_that_helps(assert_on_ranks, tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=20, intermediate_size=36, num_hidden_layers=2, num_local_experts=3)
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    assert_on_ranks(2, follow_the_refusal, tmp_path / "mixtral", tmp_path / "rewritten")


def test_a_cut_file_is_named(tied_target, assert_on_ranks):
    path = min(tied_target.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-50])
    assert_on_ranks(2, refuse, tied_target, rf"{path.name} cannot be read: .*copy or download the model again")
