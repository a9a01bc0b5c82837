"""The draft vocabulary of a new head, from the rows that it is trained on."""

import torch

from ....heads.draft_vocabulary import build_draft_vocabulary
from ..rows import answer_ends


def choose_draft_vocabulary(packed, size, stop_ids, *, vocab_size, tokenizer, note):
    """(d2t, t2d) of the `size` tokens supervised most often, stop_ids always included; `note(text)` is told what is lost."""
    counts, ends = torch.zeros(2, vocab_size, dtype=torch.int64)
    for some in packed.blocks():
        counts += torch.bincount(some.input_ids[some.supervised], minlength=vocab_size)
        ends += torch.bincount(some.input_ids[answer_ends(some)], minlength=vocab_size)
    d2t, t2d = build_draft_vocabulary(counts, size, stop_ids)
    share = int(counts[t2d].sum()) / int(counts.sum())
    note(f"draft vocabulary: {size} of {vocab_size} tokens, {share:.2%} of the supervised ones")
    lost, num_ends = ends.masked_fill(t2d, 0), int(ends.sum())
    if int(lost.sum()) > 0.01 * num_ends:
        token = int(lost.argmax())
        note(
            f"warning: {int(lost.sum()) / num_ends:.0%} of the answers end with a token that is not in the draft vocabulary, "
            f"mostly {tokenizer.decode([token])!r} ({token}). It cannot be drafted, so each of them takes one pass of the target "
            f"more, in {int(counts.sum()) / num_ends:.0f} tokens: raise draft_vocab_size, or name it among the target's "
            f"eos_token_id"
        )
    return d2t, t2d
