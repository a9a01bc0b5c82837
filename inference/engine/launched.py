"""Work that was launched on the device, and the copies of its results on their way to the host.

Letters: B requests, N nodes, J tokens emitted at most, V vocabulary.
"""

import time
from dataclasses import dataclass

import torch

from .logprobs import gather_emitted


@dataclass
class Launched:
    """Work whose tokens the host has not read yet."""

    kind: str  # "prefill" or "decode"
    requests: list
    epochs: list
    emitted: torch.Tensor  # [B, 1 + J] on the host: the number of tokens, then the tokens
    logprobs: dict  # {place of a request that asked for them: (GatheredLogprobs on the host, its first row there)}
    prompts: list  # PromptParts not delivered yet
    which: int  # of the engine's steps
    event: object  # passed when the copies have arrived; None on the CPU
    at: float  # when it was launched; where nothing is read late: done
    begin: object = None  # where the plan measures steps: an event before this one, on the CPU a time
    confidence: torch.Tensor | None = None  # of B requests or more, [., D] on the host: see speculation/draft.py
    num_read: int = 0  # requests that have been given their tokens

    def seconds(self):
        """Time of the work on the device, from `begin` on; None without one. It leaves out delays of the host before it reads."""
        if self.begin is None:
            return None
        return self.at - self.begin if self.event is None else self.begin.elapsed_time(self.event) / 1e3

    def measured(self, accepted):
        """What a plan of depths records: seconds, numbers of accepted tokens, the drafts' confidence, [] where they have none.

        accepted: {place of a request: number of its accepted tokens}
        """
        rows = [] if self.confidence is None else self.confidence[[*accepted]].tolist()
        return self.seconds(), [*accepted.values()], rows


def hand_over(
    kind, requests, emitted, seats, *, prompts=(), logits=None, path=None, which=0, begin=None, confidence=None
):
    """Start the copies to the host.  emitted [B, 1 + J], prompts: PromptParts  ->  Launched

    seats: SeatTable; logits [B, N, V]: what the tokens are scored by; path [B, J]: each one's node (None: the j-th for the j-th
    token); which, begin, confidence: see Launched.
    """
    asked, logprobs = [i for i, request in enumerate(requests) if request.params.logprobs is not None], {}
    if asked:
        count = max(requests[i].params.logprobs for i in asked)
        found = gather_emitted(emitted[:, 1:], logits, path, seats.on_device(asked), count).on_host(to_host)
        logprobs = {i: (found, place * (emitted.shape[1] - 1)) for place, i in enumerate(asked)}
    host, confidence = to_host(emitted), None if confidence is None else to_host(confidence)
    event, epochs = mark(seats.device, timed=begin is not None), [request.epoch for request in requests]
    return Launched(
        kind,
        list(requests),
        epochs,
        host,
        logprobs,
        prompts=list(prompts),
        which=which,
        event=event,
        at=time.perf_counter(),
        begin=begin,
        confidence=confidence,
    )


def mark(device, timed=False):
    """An event here in the stream; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record()
    return event


def to_host(x):
    """Start a copy to the host without waiting for it."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
