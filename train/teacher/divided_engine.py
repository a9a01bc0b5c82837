"""The engine on a target that the ranks of a run divide: on their GPUs, for one measurement, with parts of its own.

    engine = DividedEngine(source, target)                       # ValueError: why the engine cannot divide this target so
    measured = engine.run(work, head, tokenizer, **arguments)    # all ranks together; work(llm) is called on the main one

The layers of the run are divided by rows and gathered one at a time; the engine divides them by heads and features, as
docs/engine.md says. So it reads the target's files anew, and its processes end with the measurement: between measurements it takes
no memory. The other ranks wait on the CPU, for a kernel that waits would slow the engine on its GPU.
"""

import gc
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

from ...heads.checkpoint import save_head
from ...heads.storage.hub_answer import hub_options
from ...inference.llm import LLM
from ...inference.ranks.tensor_parallel import TensorParallel

LONGEST = timedelta(hours=12)  # of a measurement, the reading of a large target included


class DividedEngine:
    """source: the target's folder or Hub id; target: the FrozenTarget that the ranks of one host divide.

    All ranks build it together. Raises ValueError if the engine cannot divide this target among so many ranks.
    """

    def __init__(self, source, target):
        self.source, self.size = source, dist.get_world_size()
        self.dtype, self.device = target.dtype, target.lm_head.weight.device
        own_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if own_host != self.size:
            raise ValueError(f"{own_host} of {self.size} ranks are on this host, and the engine serves on one")
        config = AutoConfig.from_pretrained(source, **hub_options(source))
        first = torch.device(self.device.type, 0) if self.device.type == "cuda" else self.device
        TensorParallel.parse(self.size, None).check(source, config, first)
        self._waiting = dist.new_group(backend="gloo", timeout=LONGEST)

    def run(self, work, head, tokenizer, **arguments):
        """What work(llm) returns, on every rank.

        head: as it is now; arguments: further ones of LLM. Raises ValueError on all ranks if the engine cannot be built, or if work
        raises it.
        """
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps for later, the engine can use now
        dist.barrier(self._waiting)
        told = [None, None]
        if dist.get_rank() == 0:
            told = self._measured(work, head, tokenizer, arguments)
        dist.broadcast_object_list(told, src=0, group=self._waiting)
        result, error = told
        if error:
            raise ValueError(error)
        return result

    def _measured(self, work, head, tokenizer, arguments):
        """[what work returns, None], or [None, what went wrong]"""
        with tempfile.TemporaryDirectory(prefix="headstart-head-") as folder:
            saved = Path(folder) / "head"
            save_head(head, saved)
            speculative = {"model": str(saved), "num_speculative_tokens": head.num_speculative_tokens, "tree": "chain"}
            llm = None
            try:
                llm = LLM(
                    model=self.source,
                    tokenizer=tokenizer,
                    dtype=str(self.dtype).removeprefix("torch."),
                    device=self.device.type,
                    tensor_parallel_size=self.size,
                    speculative_config=speculative,
                    **arguments,
                )
                return [work(llm), None]
            except (ValueError, RuntimeError) as error:  # no memory for it, say: the run goes on
                return [None, f"{type(error).__name__}: {error}"]
            finally:
                llm = None  # its processes end
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
