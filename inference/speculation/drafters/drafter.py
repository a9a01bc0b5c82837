"""Drafter, the protocol between the engine and all drafters.

A drafter proposes the tokens of a draft tree from the row that a request's seat keeps from step to step: by default the target's
last hidden state at the last committed token. A drafter may keep its own state there instead (`state_shape`), and its own keys and
values (`kv_shape`), in pages of the same numbers as the target's.

Letters: B requests, N nodes, D the tree's depth, F width of the target's feature, S of the state, V vocabulary, VD that of drafts.
"""

from typing import ClassVar

from ....kernels.speculation.draft_logits import places_of, whole_logits
from ..draft import Draft


def no_draft(batch, tree, processor=None):
    """The root alone: the draft of a step that drafts nothing."""
    return Draft(batch.root[:, None], tree)


def rows_of(x, chosen):
    """x [B, n, S], chosen [B, k]  ->  [B, k, S]"""
    return x.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[2]))


def free_weights(modules):
    """Free the weights of modules that nobody multiplies by any more."""
    for module in modules:
        module.weight.data = module.weight.data.new_empty(0)


class Drafter:
    """Defaults of a drafter that keeps the target's last hidden state and nothing else.

    streams: layers of the target whose input's residual stream it reads, ascending; none: the last hidden state
    state_shape: (width, dtype) of its own state; None: it keeps the target's last hidden state, or nothing where it reads streams
    kv_shape: (layers, key heads, head dimension, dtype) of its own keys and values; None: it has none
    lookahead: number of tokens after a page that its own keys and values in that page depend on
    extra_places: number of places after the tree's nodes to which it writes keys and values
    tells_confidence: whether its drafts have a confidence, where it has one; set by who reads it
    autoregressive: whether a token's distribution depends on the tokens drafted before it
    max_candidates: the most tokens after a node that it has scores for; None: all of them
    num_speculative_tokens: depth of its drafts
    can_quantise: whether it has `quantise`
    saved_bytes: how many bytes fewer the parts of Head.draft_bytes (of the whole head) read than in its dtype, after `quantise`
    token_ids: int32 [VD], the tokens of its draft vocabulary, if it has one; None: all, VD = V
    """

    streams = ()
    token_ids = draft_places = None
    autoregressive = False
    state_shape = max_candidates = None
    kv_shape = None
    lookahead = 0
    extra_places = 0
    tells_confidence = False
    can_quantise = False
    saved_bytes: ClassVar = {}

    @property
    def keeps_keys(self):
        """Whether it has its own keys and values, which `fill` and `advance` compute."""
        return self.kv_shape is not None

    def take_draft_vocabulary(self, ids, vocab_size):
        """ids [VD], all different, or None"""
        if ids is not None:
            self.token_ids, self.draft_places = ids.int(), places_of(ids, vocab_size)  # [VD], [V]

    def whole(self, logits):
        """Logits of the target's tokens: minus infinity for those that a draft vocabulary lacks.  [., B, VD] -> [., B, V]"""
        if self.draft_places is None:
            return logits
        return whole_logits(logits.flatten(0, 1), self.draft_places).view(*logits.shape[:2], -1)

    def freeze(self):
        """Told that its weights will not change any more: it may lay them out anew."""

    def quantise(self, release):
        """Told, before its first draft, to round to 8 bits the weights that most of a draft's time goes into (in_8_bits).

        release: whether the head's module is the drafter's alone: it then frees the module's own copies of them
        """
        raise NotImplementedError

    def place_lm_heads(self, lm_heads):
        """Told, on several ranks, how its own lm_heads are multiplied.  lm_heads: LMHeads"""

    def attach(self, kv):
        """Use this cache [layers, 2, rows, head dimension]; called only if kv_shape is given."""

    def propose(self, batch, tree, processor=None):
        """Draft the tokens of all nodes, and give their distributions if the verifier compares them.

        batch: BatchRows; tree: TreeOnDevice; processor: None, or the logits processor for logits [K, B, V] of nodes at depths [K]
        (target_scores.draft_scores)  ->  Draft
        """
        raise NotImplementedError

    def candidates(self, batch, widths):
        """The best tokens of each depth, if every depth follows the first choices of the depths before it.

        batch: BatchRows; widths: number of tokens per depth, padded to the greatest  ->  int64 [B, len(widths), greatest width]
        """
        raise NotImplementedError

    def row_counts(self, most):
        """Numbers of rows up to `most` that take launches of `fill` which the target's products do not have."""
        return []

    # --- called only if kv_shape is given ---

    def advance(self, batch, feature, emitted, num_accepted):
        """After a step, compute the keys and values of the emitted tokens, and the state after the newest token, if it has one.

        batch: BatchRows as before the step; feature [B, D + 1, F] of the root and the accepted nodes, anything behind them;
        emitted [B, D + 2]: number of tokens, then the tokens; num_accepted [B]  ->  [B, S] or None
        """
        raise NotImplementedError

    def prompt_rows(self, chunk):
        """The rows of a chunk (scheduler.Chunk) that `fill` computes.  -> (number of rows, from the first; the tokens they read)"""
        raise NotImplementedError

    def run_dummy(self, forward_pass, feature):
        """Compile the kernels of M rows, by rows of no request, as steps and prompts compute them. Arguments of `fill`."""
        self.fill(forward_pass, feature)

    def fill(self, forward_pass, feature):
        """Compute keys and values of prompt rows.  forward_pass: ForwardPass of M rows; feature [M, F] of the target there"""
        raise NotImplementedError


class NoDrafter(Drafter):
    """Plain decoding: it drafts nothing."""

    num_speculative_tokens = 0
    propose = staticmethod(no_draft)
