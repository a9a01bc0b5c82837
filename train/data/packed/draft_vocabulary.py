"""The draft vocabulary of a new head, from the rows that it is trained on."""

import torch

from ....heads.draft_vocabulary import build_draft_vocabulary
from ..rows import answer_ends
from .blend import weighted_blocks


def choose_draft_vocabulary(packed, size, stop_ids, *, vocab_size, tokenizer, note):
    """(d2t, t2d) of the `size` tokens supervised most often, stop_ids always included; `note(text)` is told what is lost.

    Of several data sets a token counts as often as an epoch passes its set.
    """
    counts, ends = torch.zeros(2, vocab_size, dtype=torch.float64)
    for some, passes in weighted_blocks(packed):
        counts += passes * torch.bincount(some.input_ids[some.supervised], minlength=vocab_size)
        ends += passes * torch.bincount(some.input_ids[answer_ends(some)], minlength=vocab_size)
    d2t, t2d = build_draft_vocabulary(counts, size, stop_ids)
    share = float(counts[t2d].sum() / counts.sum())
    note(f"draft vocabulary: {size} of {vocab_size} tokens, {share:.2%} of the supervised ones")
    lost, num_ends = ends.masked_fill(t2d, 0), float(ends.sum())
    if float(lost.sum()) > 0.01 * num_ends:
        token = int(lost.argmax())
        note(
            f"warning: {float(lost.sum()) / num_ends:.0%} of the answers end with a token that is not in the draft vocabulary, "
            f"mostly {tokenizer.decode([token])!r} ({token}). It cannot be drafted, so each of them takes one pass of the target "
            f"more, in {float(counts.sum()) / num_ends:.0f} tokens: raise draft_vocab_size, or name it among the target's "
            f"eos_token_id"
        )
    return d2t, t2d
