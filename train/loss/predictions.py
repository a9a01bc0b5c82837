"""What a head of each family says of packed rows, up to its last product with the vocabulary: one function per family.

Depth k (from 0) of the root at t predicts x_{t+2+k}. Teacher-forced: where a head reads tokens, it reads those of the text.

Letters: B rows, T tokens per row, M = B T, H hidden size, S width of a state, V vocabulary, K depths.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...heads.packed_attention import PackedAttention
from ..run.optimization import trained


@dataclass(frozen=True)
class Predictions:
    """states: K tensors [M, S], row t of the k-th being what predicts x_{t+2+k}; they may require gradients, and get them once.

    logits: (rows [C, S] of states[k], k) -> [C, V]. draft_ids: int64 [V], the tokens of a draft vocabulary; None: the target's.
    """

    states: list
    logits: Callable
    draft_ids: torch.Tensor | None = None


def medusa_predictions(head, features, lm_head_weight):
    """Medusa heads: every one reads the feature itself.  features [B, T, H]"""
    dtype = head_dtype(head)
    weight = usable_weight(lm_head_weight, dtype) if head.config.shared_lm_head else lm_head_weight
    states = [features.flatten(0, 1)] * head.num_speculative_tokens
    return Predictions(states, lambda rows, k: head.logits(rows.to(dtype), k, weight))


def mlp_speculator_predictions(head, features, input_ids):
    """The steps of an MLP speculator, each on the state of the one before and the text's next token.

    features [B, T, H]; input_ids [B, T]: step k of the root at t reads x_{t+1+k}
    """
    tokens = next_tokens(input_ids, head.num_speculative_tokens).flatten(0, 1)  # [M, K]
    state, states = head.start(features.flatten(0, 1).to(head_dtype(head))), []
    for k in range(head.num_speculative_tokens):
        state = head.step(state, tokens[:, k], k)
        states.append(state)
    return Predictions(states, head.logits)


def eagle_predictions(head, features, input_ids, position_ids, document_ids, lm_head_weight, num_steps):
    """An EAGLE head's own forward for the first step, then `num_steps` - 1 more on its own states, as it drafts (and HASS trains).

    features [B, T, H]; the others [B, T]. Step i of the root at t reads x_{t+1+i} and the state of the step before, at position
    t + i. It attends to the pairs of the text up to t, which hold the target's features, and to the root's own of steps 1 to i.
    """
    tokens, dtype = next_tokens(input_ids, num_steps), head.fc.weight.dtype
    state, states, attention = features, [], PackedAttention(document_ids)
    for i in range(num_steps):
        pair = torch.cat((head.embed_tokens(tokens[..., i]), state), -1)  # [B, T, 2 H]
        x = head.fc(pair.to(dtype))
        state = head.layers[0](x, x, head.rotary(position_ids + i, x.dtype), attention)
        states.append(state.flatten(0, 1))
    weight = usable_weight(lm_head_weight, dtype)
    return Predictions(states, lambda rows, k: F.linear(rows.to(dtype), weight))


def eagle3_predictions(head, streams, input_ids, position_ids, document_ids, num_steps):
    """An EAGLE-3 head's unrolled steps.  streams [B, T, A HT]: what enters its aux layers, side by side; the others [B, T]"""
    states = head(streams, next_tokens(input_ids, num_steps), position_ids, document_ids, num_steps)
    return Predictions(
        [state.flatten(0, 1) for state in states], lambda rows, k: head.logits(rows), head.draft_token_ids
    )


def next_tokens(input_ids, count):
    """The tokens at t + 1 to t + count of every position t.  [B, T] -> [B, T, count]

    Behind the end of the row token 0 stands in, and behind that of a document what follows it: no label hangs on either.
    """
    padded = F.pad(input_ids, (0, count))
    return padded[:, 1:].unfold(1, count, 1)


def head_dtype(head):
    """What the head is trained in; a frozen embedding may be the target's own, in another dtype."""
    return trained(head)[0].dtype


def usable_weight(lm_head_weight, dtype):
    """The target's lm_head as heads of `dtype` multiply with it: in that dtype, or autocast's, converted here once.

    Autocast itself keeps its copies of parameters that are trained, and would convert a frozen one for every chunk.
    """
    kind = lm_head_weight.device.type
    return lm_head_weight.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype)
