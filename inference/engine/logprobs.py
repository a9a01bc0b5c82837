"""Log-probabilities of emitted and of prompt tokens: gathered on the device without waiting for it, read later on the host.

`raw_logprobs` (vLLM's default) are the log-softmax of the target's logits in fp32. `processed_logprobs` are that of the scores a
token was drawn from, after all of the request's parameters (minus infinity for tokens that are not kept). Prompt tokens were not
drawn, so their logprobs are always raw. At most SCORED_ROWS rows over the vocabulary are held at once.

Letters: R rows, V vocabulary, W listed tokens per row.
"""

from dataclasses import dataclass

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

    rank: torch.Tensor  # [R] of the token in column 0
    ids: torch.Tensor  # [R, 1 + W]
    logprobs: torch.Tensor  # fp32 [R, 1 + W]

    def map(self, function):
        return GatheredLogprobs(function(self.rank), function(self.ids), function(self.logprobs))

    def read(self, start, stop, count):
        """Rows start..stop-1 with their `count` likeliest.  -> list of {token id: Logprob}, the row's own token first"""
        columns = slice(0, 1 + count)
        rows = zip(
            self.rank[start:stop].tolist(),
            self.ids[start:stop, columns].tolist(),
            self.logprobs[start:stop, columns].tolist(),
        )
        # The row's own token comes twice if it is among the likeliest, with the same values.
        return [
            {token: Logprob(value, place) for token, value, place in zip(ids, values, (rank, *range(1, len(ids))))}
            for rank, ids, values in rows
        ]


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
            parts.append(PromptPart(request, request.epoch, first, found.map(to_host)))
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
            assert self.first <= len(request.prompt_logprobs), "a part of the prompt was never scored"
            found = self.gathered.read(0, len(self.gathered.rank), request.params.prompt_logprobs)
            request.prompt_logprobs[self.first :] = found
