"""Matcher: the place of one output in its grammar. No torch.

The tokens of a prefix alone decide the mask after it. `look_ahead` computes it for the next token, and along drafts: tokens that
the grammar forces, then what followed the newest tokens earlier, as far as the grammar allows it. All outputs of a compiled grammar
share its lexer, which is broken for all of them once one has driven it beyond the library's limits. So an output that cannot go on
is tried once more with a lexer of its own, and then fails by its own tokens only.

Letters: K masks, W words of 32 bits.
"""

import numpy as np

from .library import one_line
from .prompt_lookup import PromptLookup

ENDED, BROKEN = "ended", "broken"


class Matcher:
    """compiled: an LLMatcher at the start of the grammar, which stays there; most_drafts: the most tokens to draft.

    alone: makes another such LLMatcher, whose lexer nobody shares. late: ids that the first min_tokens tokens must not be, unless
    nothing else may follow. prompt_lookup: gives the PromptLookup of the prompt, once one is needed; drafts are looked up there,
    too.
    drafts: at most most_drafts tokens; masks: int32 [len(drafts) + 1, W], bit t of which allows the token t
    after the output, after the first of the drafts, ...; error: what the library says after BROKEN. Raises ValueError if the first
    mask is too much for the library's limits.
    """

    def __init__(self, compiled, most_drafts, alone, min_tokens=0, late=(), prompt_lookup=PromptLookup):
        self._compiled, self._most_drafts, self._alone = compiled, most_drafts, alone
        self._min_tokens, self._late, self._prompt_lookup = min_tokens, sorted(late), prompt_lookup
        self.drafts, self.masks, self.error = [], None, None
        if self.start_over([]):
            raise ValueError(self.error)

    def accept(self, token):
        """Go on by an emitted token.  -> None, ENDED if nothing may follow, BROKEN if the library gave up"""
        self._tokens.append(token)
        if self._lookup is not None:
            self._lookup.append(token)
        if not self._place.consume_token(token) and self._go_alone():
            return BROKEN
        return ENDED if self._place.is_stopped() else None

    def look_ahead(self):
        """Compute drafts and masks for the output as it is.  -> None or BROKEN"""
        return self._look(self._most_drafts)

    def start_over(self, token_ids):
        """Stand after these tokens, whatever was accepted, and look ahead.  -> None or BROKEN

        Without drafts before the first token: the pass over the prompt draws it alone.
        """
        self._stand_after(token_ids)
        return self._look(self._most_drafts if self._tokens else 0)

    def _stand_after(self, token_ids):
        self._tokens, self._place, self._lookup = list(token_ids), self._compiled.deep_copy(), None
        self._place.consume_tokens(self._tokens)

    def _look(self, most):
        """As look_ahead, along at most so many drafts."""
        place, masks, drafts = self._place, [], []
        for token in self._drafted(drafts, most):
            masks.append(np.frombuffer(place.compute_bitmask(), dtype=np.int32))
            if place.is_error() or not place.try_consume_tokens([token]):
                break
            if place.is_stopped():  # nothing may follow it, so no mask can be asked for
                place.rollback(1)
                break
            drafts.append(token)
        else:
            masks.append(np.frombuffer(place.compute_bitmask(), dtype=np.int32))
        if drafts:
            place.rollback(len(drafts))
        if place.is_error():
            return self._go_alone()
        early = max(self._min_tokens - len(self._tokens), 0)
        self.drafts, self.masks = drafts, np.stack([*map(self._without_late, masks[:early]), *masks[early:]])
        return None

    def _without_late(self, mask):
        """The mask [W] without the ids that come late, or as it is where that leaves none."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[self._late] = 0
        return np.packbits(bits, bitorder="little").view(np.int32) if bits.any() else mask

    def _drafted(self, drafts, most):
        """At most so many tokens to draft, one after the other.  drafts: those that were taken so far"""
        if not most:
            return
        yield from self._place.compute_ff_tokens()[:most]
        if self._lookup is None:
            self._lookup = self._prompt_lookup().followed_by(self._tokens)
        yield from self._lookup.after(drafts, most - len(drafts))

    def _go_alone(self):
        """Stand at the same place with a lexer of its own.  -> None, or BROKEN if it has one, or that breaks, too"""
        if self._alone is None:
            self.error = one_line(self._place.get_error())
            return BROKEN
        self._compiled, self._alone = self._alone(), None
        self._stand_after(self._tokens)
        return self.look_ahead()
