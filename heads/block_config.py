"""The shape of a block drafter; its formulas and letters are those of block.py."""

from dataclasses import dataclass

from ..kernels.sampling.sample import MAX_WIDTH
from .layers import LayerConfig
from .packed_attention import Reach


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Shape of a block drafter. `hidden_size` and `vocab_size` are the target's.

    draft_vocab_size: VD of its own lm_head; None: the target's lm_head is used.
    A block has num_speculative_tokens + 1 slots, with sample_from_anchor num_speculative_tokens.
    DSpark's parts: edge_rank: r, 0 for no edge; confidence: whether it predicts if its tokens are accepted, with
    confidence_sees_token by the token before too.
    DFlash2's: selector_rank: r, 0 for no selector, which chooses among selector_top_k tokens; conv_kernel_size: taps of the
    convolutions, 0 for none, conv_group_size: channels that share a correction.
    output_multiplier, final_logit_softcapping: of the logits by a slot's state, 0 for no cap; input_embedding_scale: of what enters
    the first layer.
    aux_layer_ids: id k is the residual stream entering layer k (0-based) of the target; mask_token_id: the token in the slots to
    be predicted; is_causal: whether a slot sees only the block's slots up to itself; num_target_layers: None if the file says none.
    sliding_layers: numbers of the head's layers with a sliding_window, at least a block long; sliding_is_causal: is_causal of
    these; window_of_block: whether their window counts from the block's first slot.
    """

    num_hidden_layers: int
    mask_token_id: int
    aux_layer_ids: tuple[int, ...]
    is_causal: bool = False
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_is_causal: bool = False
    window_of_block: bool = False
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    edge_rank: int = 0
    confidence: bool = False
    confidence_sees_token: bool = True
    selector_rank: int = 0
    selector_top_k: int = 16
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    input_embedding_scale: float = 1.0

    may_be_zero = ("edge_rank", "selector_rank", "conv_kernel_size", "final_logit_softcapping")

    def __post_init__(self):
        super().__post_init__()
        ids = self.aux_layer_ids
        if not ids or any(type(id) is not int or id < 0 for id in ids) or sorted({*ids}) != [*ids]:
            raise ValueError(f"BlockConfig.aux_layer_ids must be ascending layer numbers, got {ids!r}")
        if self.attention_bias:
            raise ValueError("BlockConfig.attention_bias must be false: block drafters have no biases")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"BlockConfig.mask_token_id must be below the vocab_size {self.vocab_size}, got {self.mask_token_id}"
            )
        self._check_sliding_layers()
        size = self.draft_vocab_size
        if size is not None and not (type(size) is int and 2 <= size <= self.vocab_size):
            raise ValueError(
                f"BlockConfig.draft_vocab_size must be None or from 2 to the vocab_size {self.vocab_size}, got {size!r}"
            )
        if not self.confidence and not self.confidence_sees_token:
            raise ValueError(
                "BlockConfig.confidence_sees_token false asks for confidence, which is false: leave it true"
            )
        if self.confidence and self.confidence_sees_token and not self.edge_rank:
            raise ValueError(
                "BlockConfig.confidence with confidence_sees_token reads the edge's table of tokens, and edge_rank is 0: give an "
                "edge_rank, or set confidence_sees_token to false"
            )
        self._check_dflash2()

    def _check_dflash2(self):
        """ValueError for parts of DFlash2 that cannot be."""
        if (self.selector_rank or self.conv_kernel_size) and (self.edge_rank or self.confidence):
            raise ValueError(
                "BlockConfig has parts of DSpark (edge_rank, confidence) and of DFlash2 (selector_rank, conv_kernel_size), and no "
                "file holds both: leave out those of one"
            )
        most = min(MAX_WIDTH, self.vocab_size)
        if self.selector_rank and not 2 <= self.selector_top_k <= most:
            raise ValueError(f"BlockConfig.selector_top_k must be from 2 to {most}, got {self.selector_top_k}")
        if self.selector_rank and self.num_scores != self.vocab_size:
            raise ValueError(
                f"BlockConfig.draft_vocab_size must be the vocab_size {self.vocab_size} or None with a selector, which chooses "
                f"among all tokens; got {self.draft_vocab_size}"
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"BlockConfig.conv_kernel_size must be at most the block's {self.block_size} slots, got {self.conv_kernel_size}"
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"BlockConfig.conv_group_size must divide the hidden_size {self.hidden_size}, got {self.conv_group_size}"
            )

    def _check_sliding_layers(self):
        layers, window = self.sliding_layers, self.sliding_window
        if any(type(one) is not int or not 0 <= one < self.num_hidden_layers for one in layers) or sorted(
            {*layers}
        ) != [*layers]:
            raise ValueError(
                f"BlockConfig.sliding_layers must be ascending layers below {self.num_hidden_layers}, got {layers!r}"
            )
        if not layers and (window is not None or self.sliding_is_causal or self.window_of_block):
            raise ValueError(
                "BlockConfig.sliding_window, sliding_is_causal and window_of_block belong to sliding_layers"
            )
        if layers and not (type(window) is int and window >= self.block_size):
            raise ValueError(
                f"BlockConfig.sliding_window must be at least a block's {self.block_size} slots, got {window!r}"
            )
        if layers and self.is_causal and (not self.sliding_is_causal or self.window_of_block):
            raise ValueError(
                "BlockConfig.is_causal is of all layers: set sliding_is_causal, too, and no window_of_block"
            )

    @classmethod
    def for_target(cls, target_config, **changes):
        """As LayerConfig.for_target; mask_token_id and aux_layer_ids must be among the changes."""
        taken = {"num_hidden_layers": 1, "num_target_layers": target_config.get_text_config().num_hidden_layers}
        return super().for_target(target_config, **taken | changes)

    @property
    def scales_logits(self):
        """Whether the logits by a slot's state are other than lm_head's products."""
        return self.output_multiplier != 1 or self.final_logit_softcapping != 0

    @property
    def num_scores(self):
        """VD: the tokens that the head has scores for."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def block_size(self):
        """S"""
        return self.num_speculative_tokens + self.first_slot

    @property
    def reaches(self):
        """What the slots see in each layer: Reaches."""
        sliding = Reach(self.sliding_is_causal, self.sliding_window, self.window_of_block)
        return [sliding if i in self.sliding_layers else Reach(self.is_causal) for i in range(self.num_hidden_layers)]

    @property
    def first_slot(self):
        """The slot that predicts the first drafted token; depth k is predicted by slot first_slot + k."""
        return 0 if self.sample_from_anchor else 1
