"""Random heads of every method for a shape: with the sizes, and so the speed, of published heads. Their drafts mean nothing."""

import torch

from ..heads.block import BlockHead
from ..heads.block_config import BlockConfig
from ..heads.checkpoint import save_head
from ..heads.eagle import Eagle, EagleConfig
from ..heads.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from ..heads.medusa import Medusa, MedusaConfig
from ..heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from ..inference.models.support import weight_bytes

DRAFT_VOCABULARY = 32000  # of published EAGLE-3 heads
FIRST_PUBLISHED_DEPTH = 7  # layers from which on a target has the aux layers of published heads
BLOCK_SHAPE = dict(num_hidden_layers=2, edge_rank=256, sample_from_anchor=True)
BLOCK_STREAMS = 5  # of the target, as published block drafters read


def empty_head(method, config, depth, shared_lm_head=False):
    """A head of `method` for a target's config, without memory, to read its shape.

    EAGLE: one layer as the target's, on the target's embedding; EAGLE-3: the same with its own DRAFT_VOCABULARY tokens, if the
    target has more; MLP speculator: `depth` tied steps as wide as the target; Medusa: `depth` heads of one block, with their own
    lm_heads or the target's; block: BLOCK_SHAPE, a block of `depth` slots, on the target's lm_head. ValueError for a target that no
    such head fits.
    """
    text = config.get_text_config()
    width, vocab_size = text.hidden_size, text.vocab_size
    with torch.device("meta"):
        if method == "medusa":
            return Medusa(MedusaConfig(width, vocab_size, depth, shared_lm_head=shared_lm_head))
        if method == "mlp_speculator":
            return MLPSpeculator(MLPSpeculatorConfig(width, vocab_size, inner_size=width, num_steps=depth))
        if method == "eagle":
            head = Eagle(EagleConfig.for_target(config, num_speculative_tokens=depth))
        elif method == "block":
            read = dict(mask_token_id=vocab_size - 1, aux_layer_ids=block_aux_layers(text.num_hidden_layers))
            head = BlockHead(BlockConfig.for_target(config, num_speculative_tokens=depth, **BLOCK_SHAPE, **read))
        else:
            changes = dict(
                draft_vocab_size=min(DRAFT_VOCABULARY, vocab_size), aux_layer_ids=aux_layers(text.num_hidden_layers)
            )
            head = Eagle3(Eagle3Config.for_target(config, num_speculative_tokens=depth, **changes))
    head.embed_tokens = None  # the target's
    return head


def aux_layers(num_layers):
    """The aux layers of published EAGLE-3 heads; for a target too shallow for them, the first, the middle and the end."""
    if num_layers >= FIRST_PUBLISHED_DEPTH:
        return default_aux_layers(num_layers)
    return tuple(sorted({0, num_layers // 2, num_layers}))


def block_aux_layers(num_layers):
    """The aux layers of published block drafters, evenly from 2 to n - 2; of a shallow target, its first ones."""
    if num_layers < BLOCK_STREAMS + 3:
        return tuple(range(min(num_layers, BLOCK_STREAMS)))
    return tuple(round(2 + i * (num_layers - 4) / (BLOCK_STREAMS - 1)) for i in range(BLOCK_STREAMS))


def random_head(method, config, decoder, depth, shared_lm_head=False):
    """A head with random weights, made on the device of a target's Decoder and in its dtype, on the target's embedding."""
    head = _random(method, config, depth, shared_lm_head, decoder.dtype, decoder.device)
    if method in ("eagle", "eagle3", "block"):
        head.take_embedding(decoder.embedding)
    return head


def save_random_head(method, config, depth, folder, *, dtype, device):
    """Write a head with random weights; as in published files, a table of the target's embedding is not among them."""
    save_head(_random(method, config, depth, False, dtype, device), folder)


def _random(method, config, depth, shared_lm_head, dtype, device):
    """A head with random weights, which waits for the target's embedding if it reads that."""
    head = empty_head(method, config, depth, shared_lm_head).to(dtype)
    head = head.to_empty(device=device).requires_grad_(False)
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    if method == "eagle3" and head.d2t is not None:
        # Spread over the whole vocabulary, like frequent tokens.
        number = torch.arange(len(head.d2t), device=device)
        chosen = number * len(head.t2d) // len(number)
        t2d = torch.zeros_like(head.t2d)
        t2d[chosen] = True
        head.set_draft_vocabulary(chosen - number, t2d)
    return head.eval()


def parameter_bytes(head, dtype):
    """Bytes of a head's own weights, beside the target's."""
    return dtype.itemsize * sum(parameter.numel() for parameter in head.parameters())


def bytes_with_head(config, dtype, method, depth, shared_lm_head=False):
    """Bytes of a target's weights and of a head beside it."""
    return weight_bytes(config, dtype) + parameter_bytes(empty_head(method, config, depth, shared_lm_head), dtype)
