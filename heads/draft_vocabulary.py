"""The draft vocabulary of EAGLE-3 heads and block drafters: a part of the target's tokens, in the form of published files.

d2t int64 [VD]: draft token i is the target's token i + d2t[i] (offsets, not ids); t2d bool [V]: whether a token of the target
is in the draft vocabulary.
"""

import torch


def build_draft_vocabulary(counts, size, always=()):
    """The `size` most frequent tokens: (d2t, t2d), ids ascending, ties to the lower id.

    counts [V]: how often each token is supervised; always: ids that are included whatever their counts, such as stop
    tokens (other tokens are never drafted). Raises ValueError for a size or ids that the vocabulary does not have.
    """
    vocab_size = len(counts)
    always = sorted({int(id) for id in always})
    if not 2 <= size <= vocab_size:
        raise ValueError(f"the draft vocabulary must have from 2 to the target's {vocab_size} tokens, got {size}")
    if always and not 0 <= always[0] <= always[-1] < vocab_size:
        raise ValueError(f"tokens {always} are to be in the draft vocabulary, but the target's end at {vocab_size - 1}")
    if len(always) > size:
        raise ValueError(f"{len(always)} tokens are to be in a draft vocabulary of {size}")
    order = counts.to("cpu", torch.float64, copy=True)
    order[always] = torch.inf
    ids = torch.argsort(order, descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(size), t2d


class DraftsOverVocabulary:
    """Part of a head whose buffers d2t and t2d say what it drafts; both are None for the whole vocabulary."""

    @property
    def draft_token_ids(self):
        """The target's id of every draft token, int64 [VD]; None for the whole vocabulary."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, d2t, t2d):
        """Draft over these tokens (build_draft_vocabulary). Raises ValueError if their sizes are not this head's."""
        if self.d2t is None:
            raise ValueError("this head drafts over the whole vocabulary: it takes no d2t and t2d")
        check_t2d(t2d, check_d2t(d2t, self.config.draft_vocab_size, self.config.vocab_size))
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)


def missing_stop_tokens(head, stop_ids):
    """A sentence on the cost of a head that drafts none of the tokens `stop_ids`; None if it drafts one of them, or there are none.

    One of several is enough: models name stop tokens that only end other kinds of output.
    """
    drafted = getattr(head, "draft_token_ids", None)
    stop_ids = sorted(stop_ids)
    if drafted is None or not stop_ids or not set(stop_ids).isdisjoint(drafted.tolist()):
        return None
    return (
        f"the {len(drafted)} tokens that this head drafts hold none of those that end an answer ({', '.join(map(str, stop_ids))}): "
        "its last token is never a draft, so every answer takes up to one pass of the target more. Train with a draft vocabulary "
        "that has them"
    )


def check_d2t(d2t, draft_vocab_size, vocab_size):
    """The t2d [V] that belongs to a d2t. ValueError, naming tensor and expectation, for other sizes and for repeated ids."""
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (draft_vocab_size,):
        raise ValueError(f"tensor d2t is {d2t.dtype} {tuple(d2t.shape)}, expected torch.int64 {(draft_vocab_size,)}")
    ids = torch.arange(draft_vocab_size) + d2t.cpu()
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"tensor d2t gives draft token {first} the id {int(ids[first])} (d2t holds offsets: {first} + {int(d2t[first])}), "
            f"expected ids from 0 to {vocab_size - 1}"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    if repeated := draft_vocab_size - int(t2d.sum()):
        raise ValueError(f"tensor d2t gives {repeated} ids more than once, expected distinct ones")
    return t2d


def check_t2d(t2d, expected):
    """ValueError, naming the difference, unless t2d equals `expected` [V]."""
    if t2d.dtype != torch.bool or t2d.shape != expected.shape:
        raise ValueError(f"tensor t2d is {t2d.dtype} {tuple(t2d.shape)}, expected torch.bool {tuple(expected.shape)}")
    wrong = (t2d.cpu() != expected).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"tensor t2d disagrees with d2t on {len(wrong)} tokens: it says {bool(t2d[first])} of token {first}, expected "
            f"{bool(expected[first])}"
        )


def read_draft_vocabulary(d2t, t2d, draft_vocab_size, vocab_size):
    """The tensors d2t and t2d of a head, from a file's, None where it lacks them; {} for the whole vocabulary."""
    if d2t is None:
        if draft_vocab_size < vocab_size or (t2d is not None and not t2d.all()):
            raise ValueError(
                f"missing: d2t; tensor lm_head.weight has {draft_vocab_size} rows of a vocabulary of {vocab_size}, so d2t and "
                "t2d must say which"
            )
        return {}
    found = check_d2t(d2t, draft_vocab_size, vocab_size)
    if t2d is not None:
        check_t2d(t2d, found)
    if draft_vocab_size < vocab_size:
        return {"d2t": d2t, "t2d": found}
    if d2t.any():
        raise ValueError(
            "tensor d2t reorders the whole vocabulary, expected zeros where draft and target have the same tokens"
        )
    return {}
