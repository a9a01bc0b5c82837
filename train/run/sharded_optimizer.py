"""AdamW whose moments are divided over the ranks (ZeRO stage 1, arXiv 1910.02054), for a head that every rank holds whole.

    reduce-scatter of the gradients -> AdamW on this rank's part -> all-gather of the weights

These move as many bytes as one all-reduce of the gradients, in two launches. Bytes per trained parameter on each of N ranks, all in
fp32:

    weight 4 + gradient 4 + moments 8 / N      (one process: 16)

Weights and gradients stay whole: the loss multiplies with the head's matrices chunk by chunk, outside any module's forward, so
sharded weights would be gathered and their gradients scattered again for every chunk. The saved state is whole, in the form of
torch's own AdamW, and loads with any number of ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renamed both; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALIGNED = 32  # values: parameters and parts begin at multiples of 128 bytes, for vectorised kernels


class ShardedAdamW:
    """Like torch.optim.AdamW, but `param_groups` hold the parts of the parameters that this rank updates.

    groups: as for torch.optim; their parameters are fp32, on one device, and equal on all ranks; options: of torch.optim.AdamW.
    Gradients become views of one buffer. All ranks call every method together.
    """

    def __init__(self, groups, rank, world, **options):
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        starts, end = [], 0
        for parameter in self.parameters:
            starts.append(end)
            end += _round_up(parameter.numel())
        self.rank, self.num_updates = rank, 0
        part_size = _round_up(-(-end // world))
        # The gradients; between two steps also the buffer for sending weights and moments.
        self.buffer = torch.zeros(world * part_size, device=self.parameters[0].device)
        first = rank * part_size
        self.part = self.buffer[first : first + part_size]
        self.views = [
            self.buffer[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(starts, self.parameters)
        ]
        self.pieces = []  # (index of a parameter, lo, hi, a Parameter of its values lo:hi), this rank's
        local, index = [], 0
        for group in groups:
            own = []
            for parameter in group["params"]:
                lo = max(first - starts[index], 0)
                hi = min(first + part_size - starts[index], parameter.numel())
                if lo < hi:
                    piece = nn.Parameter(parameter.detach().view(-1)[lo:hi])
                    piece.grad = self.views[index].view(-1)[lo:hi]
                    self.pieces.append((index, lo, hi, piece))
                    own.append(piece)
                index += 1
            local.append(group | {"params": own})
        self.sizes = [len(group["params"]) for group in groups]
        self.adamw = torch.optim.AdamW(local, **options)
        self.zero_grad()

    @property
    def param_groups(self):
        return self.adamw.param_groups

    @property
    def own_pieces(self):
        """The pieces that this rank updates (list of Parameter)."""
        return [piece for *_, piece in self.pieces]

    def zero_grad(self):
        self.buffer.zero_()
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view

    @torch.no_grad()
    def sum_gradients(self):
        """Sum the gradients of this rank's parts over all ranks."""
        for parameter, view in zip(self.parameters, self.views):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        _reduce_scatter(self.part, self.buffer)

    def gradient_norm(self):
        """The norm of all ranks' parts together."""
        # In fp32 the square would overflow at norms that fp32 itself can hold.
        square = torch.linalg.vector_norm(self.part).double().square()
        dist.all_reduce(square)
        return square.sqrt().float()

    @torch.no_grad()
    def step(self):
        """Update this rank's parts with their gradients, and the head with every rank's parts. The gradients are overwritten."""
        for index, lo, hi, piece in self.pieces:
            # Looked up again: an engine built on the head has packed some of its weights elsewhere.
            piece.data = self.parameters[index].detach().view(-1)[lo:hi]
        self.adamw.step()
        self.num_updates += 1
        for piece in self.own_pieces:
            piece.grad.copy_(piece)
        _all_gather(self.buffer, self.part)
        for parameter, view in zip(self.parameters, self.views):
            parameter.copy_(view)

    @torch.no_grad()
    def state_dict(self):
        """The whole head's state on rank 0, in torch.optim.AdamW's form, on the CPU; None elsewhere. Gradients must be zero."""
        state, main = {}, self.rank == 0
        for name in ("exp_avg", "exp_avg_sq") if self.num_updates else ():
            for piece in self.own_pieces:
                if piece in self.adamw.state:  # else it never had a gradient: possible in a loaded run of one process
                    piece.grad.copy_(self.adamw.state[piece][name])
            _all_gather(self.buffer, self.part)
            for index, view in enumerate(self.views if main else ()):
                step = torch.tensor(float(self.num_updates))
                state.setdefault(index, {"step": step})[name] = view.to("cpu", copy=True)
            self.buffer.zero_()
        places = iter(range(len(self.parameters)))
        groups = [
            group | {"params": [next(places) for _ in range(size)]}
            for group, size in zip(self.param_groups, self.sizes)
        ]
        return {"state": state, "param_groups": groups} if main else None

    def load_state_dict(self, whole):
        """Take this rank's part of the state of the whole head, as torch.optim.AdamW gives it."""
        state = {}
        for place, (index, lo, hi, _) in enumerate(self.pieces):
            if entry := whole["state"].get(index):
                state[place] = {
                    name: value.reshape(-1)[lo:hi].clone() if name != "step" else value for name, value in entry.items()
                }
        self.num_updates = max((int(entry["step"]) for entry in whole["state"].values()), default=0)
        places = iter(range(len(self.pieces)))
        groups = [
            saved | {"params": [next(places) for _ in own["params"]]}
            for saved, own in zip(whole["param_groups"], self.param_groups)
        ]
        self.adamw.load_state_dict({"state": state, "param_groups": groups})


def _round_up(count):
    return -(-count // _ALIGNED) * _ALIGNED
