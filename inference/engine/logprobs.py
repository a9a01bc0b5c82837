"""Log-probabilities of emitted and of prompt tokens: gathered on the device without waiting for it, read later on the host.

`raw_logprobs` (vLLM's default) are the log-softmax of the target's logits in fp32. `processed_logprobs` are that of the scores a
token was drawn from, after all of the request's parameters (minus infinity for tokens that are not kept). Prompt tokens were not
drawn, so their logprobs are always raw. At most SCORED_ROWS rows over the vocabulary are held at once.

The engine keeps numbers (TokenLogprobs). Logprobs are made of them when an output has ended: to make those of 5 tokens for 64
requests took the host a millisecond of every step, and the garbage collector walked them all.

Letters: R rows, V vocabulary, W listed tokens per row.
"""

from array import array
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.linear.linear import empty_rows
from ...kernels.sampling.rank_tokens import rank_tokens
from ...kernels.sampling.sample import MAX_WIDTH, log_sum_exp, top_tokens, top_tokens_reference

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
SCORED_ROWS = 256  # rows of logits at once: 66 MB in bf16 at a vocabulary of 128,256
# Numbers of likeliest tokens that are looked for: a few, so that few kernels are compiled, all of them at the start.
WIDTHS = (5, 20, MAX_WIDTH)
# Sorting, for more tokens than top_tokens takes, needs some 30 bytes per row and token.
SORTED_ROWS = 32


@dataclass
class Logprob:
    """Log-probability of one token, its rank, and its text.

    rank: place among all tokens, 1 for the likeliest, ties to the lowest id. Without ties it equals vLLM's rank, the number of
    tokens at least as likely; with ties it still numbers the listed tokens from 1 without gaps.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class GatheredLogprobs:
    """R rows of logprobs. Column 0: the emitted token or the prompt's token; the others: the likeliest tokens, best first."""

    rank: torch.Tensor | np.ndarray  # int64 [R] of the token in column 0
    ids: torch.Tensor | np.ndarray  # int64 [R, 1 + W]
    logprobs: torch.Tensor | np.ndarray  # fp32 [R, 1 + W]

    def on_host(self, to_host):
        """The same as arrays of the host, filled when the copies arrive.  to_host(tensor): starts a copy"""
        return GatheredLogprobs(*(to_host(x).numpy() for x in (self.rank, self.ids, self.logprobs)))


class TokenLogprobs:
    """Logprobs of tokens, in order, as numbers: the rank of each, and 1 + W ids and logprobs as in a row of GatheredLogprobs.

    12 bytes per listed token and 8 per token, in arrays that the garbage collector does not walk.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks", "_width")

    def __init__(self):
        self._width, self._ids, self._logprobs, self._ranks = 1, array("q"), array("f"), array("q")

    def __len__(self):
        return len(self._ranks)

    def extend(self, gathered, start, stop, count):
        """Add rows start..stop-1 of a GatheredLogprobs on the host.  count: of their likeliest tokens, the same in every call

        The length changes last: after an interrupt `cut` removes what was added in part.
        """
        ids = gathered.ids[start:stop, : 1 + count]
        self._width = ids.shape[1]  # less if the vocabulary is smaller
        self._ids.frombytes(ids.tobytes())
        self._logprobs.frombytes(gathered.logprobs[start:stop, : 1 + count].tobytes())
        self._ranks.frombytes(gathered.rank[start:stop].tobytes())

    def cut(self, length):
        """Keep the first `length` tokens."""
        del self._ranks[length:], self._ids[length * self._width :], self._logprobs[length * self._width :]

    def after(self, start):
        """TokenLogprobs of the tokens from number `start` on."""
        found, first = TokenLogprobs(), start * self._width
        found._width, found._ranks = self._width, self._ranks[start:]
        found._ids, found._logprobs = self._ids[first:], self._logprobs[first:]
        return found

    def own(self):
        """The log-probability of each token itself."""
        return self._logprobs[:: self._width].tolist()

    def entries(self, text_of=None):
        """A {token id: Logprob} per token, its own first.  text_of(token id): decoded_token, None if there is no tokenizer"""
        width, places = self._width, range(1, self._width)
        found = []
        for i, rank in enumerate(self._ranks):
            row = slice(i * width, (i + 1) * width)
            # The token itself comes twice if it is among the likeliest, with the same values.
            rows = zip(self._ids[row], self._logprobs[row], (rank, *places))
            found.append({token: Logprob(value, place, text_of and text_of(token)) for token, value, place in rows})
        return found


def gather_logprobs(logits, tokens, count):
    """logits [R, V], tokens [R]  ->  GatheredLogprobs of each row's token and the `count` likeliest, at most V"""
    own = tokens.long()[:, None]
    ids = torch.cat((own, _likeliest(logits, min(count, logits.shape[1]))), 1)
    values = logits.gather(1, ids).float() - log_sum_exp(logits)[:, None]
    return GatheredLogprobs(rank_tokens(logits, tokens), ids, values)


def gather_in_slices(rows_of, tokens, count):
    """The same where the rows are only made SCORED_ROWS at a time: rows_of(slice) -> their logits.  tokens [R]"""
    parts = []
    for start in range(0, len(tokens), SCORED_ROWS):
        some = slice(start, start + SCORED_ROWS)
        parts.append(gather_logprobs(rows_of(some), tokens[some], count))
    return GatheredLogprobs(*(torch.cat(x) for x in zip(*((p.rank, p.ids, p.logprobs) for p in parts))))


def gather_emitted(tokens, logits, path, asked, count):
    """Of the batch rows `asked` [A].  tokens [B, J], logits [B, N, V]  ->  GatheredLogprobs, R = A J

    path [B, J]: the node of each token; None: the j-th token belongs to the j-th node. Entries after a request's last token are
    arbitrary, and their results are never read.
    """
    tokens, rows = tokens[asked], logits.flatten(0, 1)  # [A, J], [B N, V]
    nodes = torch.arange(tokens.shape[1], device=rows.device) if path is None else path[asked]
    wanted = (asked[:, None] * logits.shape[1] + nodes).flatten()
    return gather_in_slices(lambda some: rows.index_select(0, wanted[some]), tokens.flatten(), count)


def score_hidden(decoder, hidden, tokens, count):
    """Raw logprobs of the tokens after hidden states.  [R, H], [R] -> GatheredLogprobs"""

    def rows_of(some):
        # A copy of the rows starts at a multiple of 16 bytes, as tensor maps require, and has room after it.
        rows = hidden[some]
        return decoder.logits(empty_rows(*rows.shape, rows.dtype, rows.device).copy_(rows))

    return gather_in_slices(rows_of, tokens, count)


def score_prompts(chunks, computed, decoder, on_device, to_host):
    """Launch the logprobs of the prompt tokens that the chunks' tokens predict, where they are wanted.  -> list of PromptPart

    computed: KnownOutput of the chunks' tokens, one chunk after the other; on_device(list), to_host(tensor): copies without a wait.
    """
    parts, end = [], 0
    for chunk in chunks:
        start, end, request, first = end, end + chunk.count, chunk.request, chunk.start + 1
        targets = request.prompt_token_ids[first : first + chunk.count]
        if request.wants_prompt_logprobs and targets:
            rows = computed.of(decoder, start, start + len(targets))
            found = score_hidden(decoder, rows, on_device(targets), request.params.prompt_logprobs)
            parts.append(PromptPart(request, request.epoch, first, found.on_host(to_host)))
    return parts


def _likeliest(logits, count):
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    if count <= MAX_WIDTH:
        width = min(next(width for width in WIDTHS if width >= count), logits.shape[1])
        return top_tokens(logits, width)[:, :count]
    return torch.cat([top_tokens_reference(block, count) for block in logits.split(SORTED_ROWS)])


@dataclass(frozen=True)
class PromptPart:
    """Logprobs of prompt tokens first, first + 1 ... of a request, on their way to the host."""

    request: object
    epoch: int  # of the request when they were launched
    first: int
    gathered: GatheredLogprobs

    def deliver(self):
        """Put the logprobs in their places, unless the request has ended or was preempted (then they are computed again).

        Delivering twice does no harm: places are overwritten.
        """
        request = self.request
        if request.epoch == self.epoch and not request.finished:
            known, before = request.prompt_logprobs, self.first - 1  # the first token has none
            assert before <= len(known), "a part of the prompt was never scored"
            known.cut(before)
            known.extend(self.gathered, 0, len(self.gathered.rank), request.params.prompt_logprobs)
