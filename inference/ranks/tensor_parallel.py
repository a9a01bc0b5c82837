"""Tensor parallelism as LLM's arguments ask for it: checked before anything is read, then the group of ranks and its parts.

    parallel = TensorParallel.parse(tensor_parallel_size, tensor_parallel_invariant)
    parallel.check(model, config, device)
    with parallel.joined(config, device, arguments) as division:     # the other ranks build the same LLM meanwhile
        decoder = load_decoder(..., division=division)
        ...
        session = parallel.session(engine, ...)

In the process of another rank tensor_parallel_size is the group itself (worker.py).
"""

import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...heads.storage.keywords import python_value
from ..engine.options import check_whole
from ..models.division import INVARIANTS, WHOLE, Division, check_divides
from ..models.modules.divided_products import FeatureDivision
from ..models.support import decoder_class
from ..models.transport import ALONE, GlooRanks
from ..session import Session
from .host_memory import shared_host_memory
from .lockstep import FollowedPlan, LeadingSession, LedPlan
from .peer_ranks import PeerRanks, shared_memory
from .processes import RankProcesses


@dataclass
class TensorParallel:
    """size: number of ranks; invariant: None, or the number of ranges of products that are divided along K.

    member: the group, in the process of a rank other than the first
    """

    size: int
    invariant: int | None = None
    member: GlooRanks | None = None
    processes: RankProcesses | None = None  # of the other ranks, once they have been started

    @classmethod
    def parse(cls, size, invariant):
        """Of LLM's arguments. Raises ValueError."""
        member = size if isinstance(size, GlooRanks) else None
        size, invariant = member.size if member else python_value(size), python_value(invariant)
        check_whole("tensor_parallel_size", size, 1)
        if invariant is not None and invariant not in INVARIANTS:
            raise ValueError(
                f"tensor_parallel_invariant must be None or one of {', '.join(map(str, INVARIANTS))}, got {invariant!r}"
            )
        return cls(size, invariant, member)

    def check_shared(self, decoder):
        """ValueError unless an LLM may share this decoder of another one."""
        if self.divides or not decoder.is_whole:
            raise ValueError(
                "weights that ranks divide cannot be shared by two LLMs yet: give each the model's folder and "
                "tensor_parallel_size"
            )

    @property
    def divides(self):
        """Whether the decoder is another than that of a single device."""
        return self.size > 1 or self.invariant is not None

    def check(self, model, config, device):
        """ValueError for what cannot be divided: heads, weights that are loaded, GPUs.  device: torch.device"""
        if not self.divides or self.member:  # rank 0 has checked
            return
        given = f"tensor_parallel_size={self.size}"
        if isinstance(model, nn.Module):
            raise ValueError(
                f"{given} reads its parts in several processes: give the model's folder, not a loaded model"
            )
        if decoder_class(config).is_packed:
            check_divides(config, self.size, self.invariant)
        if device.type == "cuda" and self.size > 1:
            check_gpus(device, self.size)

    def check_drafts(self, asked):
        """ValueError for a draft_tensor_parallel_size that is neither 1 nor all ranks.  asked: None for the default"""
        if asked not in (None, 1, self.size) and self.size == 1:
            raise ValueError(
                f"draft_tensor_parallel_size={asked}: there is one rank; give tensor_parallel_size={asked}, too, or leave it out"
            )
        if asked not in (None, 1, self.size):
            raise ValueError(
                f"draft_tensor_parallel_size={asked}: a head's lm_heads are divided among all {self.size} ranks "
                f"(tensor_parallel_size), or held whole by each: give {self.size}, 1, or leave it out"
            )

    @contextmanager
    def joined(self, config, device, arguments):
        """Start the other ranks, whose LLMs have these arguments, and meet them.  -> the Division of this rank's decoder

        An error inside ends them.
        """
        if not self.divides:
            yield WHOLE
        elif self.member or self.size == 1:
            if self.member and device.type == "cuda":
                torch.cuda.set_device(device)  # this process has no other
            yield self._division(config, self._transport(self.member, device), device)
        else:
            self.processes = RankProcesses(self.size)
            with self.processes.starting():
                self.processes.begin(arguments, torch.get_num_threads())
                host = GlooRanks(self.processes.folder, 0, self.size, self.processes.have_ended)
                ranks = self._transport(host, device)
                if device.type == "cuda":
                    self.processes.stop_by(ranks.stopper())
                division = self._division(config, ranks, device)
                self._tell(division)
                yield division

    def device_of(self, device):
        """The device of this rank.  device: rank 0's torch.device; the GPUs after it are the others'"""
        if device.type != "cuda" or self.size == 1:
            return device
        rank = self.member.rank if self.member else 0
        return torch.device("cuda", _gpus(device, self.size)[rank])

    def _division(self, config, ranks, device):
        """The part of one rank of a model."""
        if decoder_class(config).is_packed:
            return Division(config, ranks, device.type, self.invariant)
        return WHOLE if ranks.size == 1 else FeatureDivision(ranks)  # the same bits for any number

    def _transport(self, host, device):
        """What gathers tensors on a device.  host: the GlooRanks, None for a group of one"""
        if host is None or device.type != "cuda":
            return host or ALONE
        # What rank 0 sees counts: all ranks have to use the same memory.
        apart = not self.member and unreachable(_gpus(device, self.size)) is not None
        if host.of_first([apart])[0]:
            return PeerRanks(host, shared_host_memory(host, device), on_host=True)
        return PeerRanks(host, shared_memory(host, device))

    def _tell(self, division):
        """Say where one device would give other bits."""
        if not division.keeps_bits:
            warnings.warn(
                f"with tensor_parallel_size={self.size} outputs are the same bits with and without speculation, but not those of "
                "another tensor_parallel_size: sums of some products are cut at other places. The same tensor_parallel_invariant, "
                "given with each of them, makes them equal",
                stacklevel=5,  # where the LLM is made
            )

    def led(self, speculation):
        """The Speculation whose plan decides the same on all ranks."""
        if self.size == 1:
            return speculation
        return replace(speculation, plan=(FollowedPlan if self.member else LedPlan)(speculation.plan))

    def session(self, *given):
        """The Session of this rank's engine."""
        return LeadingSession(*given, ranks=self.processes) if self.processes else Session(*given)


def check_gpus(first, size):
    """ValueError unless so many GPUs, from the first on, can be seen; a warning where they do not reach each other's memory."""
    gpus, seen = _gpus(first, size), torch.cuda.device_count()
    given = f"tensor_parallel_size={size}"
    if max(gpus) >= seen:
        raise ValueError(
            f"{given} takes the GPUs {gpus[0]} to {gpus[-1]}, one for each rank, and {seen} can be seen (CUDA_VISIBLE_DEVICES): "
            f"{max(seen - gpus[0], 1)} would fit"
        )
    if pair := unreachable(gpus):
        warnings.warn(
            f"{given}: GPU {pair[0]} cannot reach the memory of GPU {pair[1]} (peer access), so the ranks' sums pass through the "
            "host's memory: the same bits, but a step takes 1.2 to 2.2 times as long, and a long prompt 5 times (two H200s). GPUs "
            "that NVLink connects reach each other (nvidia-smi topo -p2p r); CUDA_VISIBLE_DEVICES chooses them",
            stacklevel=4,  # where the LLM is made
        )


def unreachable(gpus):
    """The first pair of GPUs of which one cannot reach the other's memory; None where all can."""
    pairs = ((one, other) for one in gpus for other in gpus if one != other)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def _gpus(first, size):
    """Indices of the ranks' GPUs. With torch's variable for tests several ranks share one."""
    start, seen = first.index or 0, torch.cuda.device_count()
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    return [(start + rank) % seen if shared else start + rank for rank in range(size)]
