"""Stage joint on a CUDA device: a bf16 target under autocast, fp32 adapter; the engine's bits on the adapted target."""

import warnings

import pytest
import torch

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export.provenance import write_merged_target
from headstart.inference.llm import LLM
from headstart.inference.models.adapter import read_adapter
from headstart.inference.sampling_params import SamplingParams
from headstart.train import medusa
from headstart.train.teacher.features import FrozenTarget, load_target
from headstart.train.teacher.target_adapter import TargetAdapter

pytestmark = pytest.mark.gpu

JOINT = {"stage": "joint", "medusa_weight": 0.2, "target_lr": 0.02, "lora_rank": 4, "lora_alpha": 8, "autocast": "bf16"}


@pytest.fixture
def trained(arguments, tmp_path):
    """The run folder of a few joint steps, measured and checkpointed on the way."""
    torch.manual_seed(5)
    save_head(Medusa(MedusaConfig(32, 48, 3)), tmp_path / "start")
    keys = {"max_steps": 6, "eval_every": 2, "checkpoint_every": 3, "eval_prompts": 4, "eval_tokens": 12}
    words = arguments(**JOINT, **keys, start_from=tmp_path / "start")
    assert medusa.main(words) == 0
    return tmp_path / "run", words


def test_joint_run_on_the_gpu_learns_measures_and_resumes(trained, read_metrics):
    run, words = trained
    lines = read_metrics()
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["target_loss"] == pytest.approx(0, abs=1e-4)  # the adapter starts as the identity
    measured = read_metrics("acceptance")
    assert [line["step"] for line in measured] == [2, 4, 6]
    assert all(line["source"] == "engine" and line["acceptance_length"] >= 1 for line in measured)
    assert measured[-1]["heldout_loss"] != measured[-1]["frozen_heldout_loss"]
    # The frozen target is the same before and after it was merged over: its loss has not moved by a bit.
    assert len({line["frozen_heldout_loss"] for line in measured}) == 1
    assert medusa.main([*words, "--resume_from", str(run / "checkpoints" / "step-000003")]) == 0
    again = read_metrics()
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in lines], rel=2e-2)


def test_merging_on_the_gpu_leaves_every_bit_of_the_target(word_target):
    device = torch.device("cuda")
    target = FrozenTarget(load_target(word_target, device)[0])
    assert target.dtype == torch.bfloat16
    adapter = TargetAdapter(target, rank=4, alpha=8)
    for weight in adapter.weights:
        torch.nn.init.normal_(weight, std=0.2)
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    ids = torch.arange(20, device=device)[None]
    batch = (ids, ids, torch.zeros_like(ids))
    with torch.autocast("cuda", torch.bfloat16):
        adapted = target.features(*batch).float()
    with adapter.merged():
        merged = target.features(*batch).float()
    with adapter.disabled():
        frozen = target.features(*batch).float()
    # Roundings of a product more or less, against what the adapter does.
    assert (merged - adapted).abs().mean() < 0.1 * (frozen - adapted).abs().mean()
    assert all(torch.equal(p, before[name]) for name, p in target.model.named_parameters())
    with adapter.disabled(), torch.autocast("cuda", torch.bfloat16):
        under_autocast = target.features(*batch)
    # Under autocast the library's own norms compute, elsewhere the engine's: roundings, again.
    assert (under_autocast.float() - frozen).abs().mean() < 0.1 * (frozen - adapted).abs().mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_on_the_adapted_target_changes_no_bit(trained, word_target, tmp_path, dtype, temperature):
    run, _ = trained
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True, logprobs=0)

    def decode(*given, **options):
        outputs = [out.outputs[0] for out in LLM(*given, **options).generate([[0, 5, 9, 1], [0, 7, 1]], params)]
        return [(one.token_ids, one.cumulative_logprob) for one in outputs]

    plain = decode(word_target, adapter=run, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert decode(word_target, adapter=run, dtype=dtype, speculative_config={"model": run}) == plain
    assert decode(word_target, dtype=dtype) != plain
    if dtype == "float32":  # that of the target's files: merged into them the weights are the same bits
        write_merged_target(read_adapter(run), type(run)(word_target), tmp_path / "merged", "")
        assert decode(tmp_path / "merged", dtype=dtype) == plain
