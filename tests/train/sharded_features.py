"""A script that every rank of test_many_gpus.py runs: on GPUs a target divided with FSDP2 gives the bits of the whole one."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.sharded_target import load_sharded

(folder,) = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
for dtype in (torch.float32, torch.bfloat16):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    whole, divided = FrozenTarget(model), FrozenTarget(load_sharded(folder, dtype, device))
    assert divided.is_sharded
    assert not whole.is_sharded
    generator = torch.Generator().manual_seed(rank)  # another text per rank
    for _ in range(2):
        tokens = torch.randint(0, whole.vocab_size, (2, 200), generator=generator).to(device)
        places = torch.arange(200, device=device).expand(2, -1)
        batch = tokens, places, torch.zeros_like(tokens), (0, 2)
        assert torch.equal(divided.features(*batch), whole.features(*batch)), dtype
print(f"rank {dist.get_rank()}: the same bits", file=sys.stderr)
dist.destroy_process_group()
