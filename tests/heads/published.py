"""Small random checkpoints with exactly the names, shapes and configs of published heads, the odd ones included, and their maths.

    LAYOUTS["EAGLE-3, original"].write(folder)

Every layout has the expected result of reading it: its format, its notes, and its logits in fp64, from the published names by an
implementation without code of heads/ (for EAGLE heads eagle_reference.py, for MLP speculators test_mlp_speculator.py).
"""

from dataclasses import replace

import torch

from headstart.tests.heads.published_eagle import EMBEDDING, eagle3_layouts, eagle_layouts
from headstart.tests.heads.published_file import FEATURES, STEPS, TOKENS
from headstart.tests.heads.published_medusa import medusa_layouts
from headstart.tests.heads.published_mlp_speculator import MLP_FEATURES, mlp_layouts
from headstart.tests.heads.test_eagle import LM_HEAD, H, T, one_document

LAYOUTS = medusa_layouts() | mlp_layouts() | eagle_layouts() | eagle3_layouts()


def in_shards(layout, file_name):
    """The same checkpoint in three shards."""
    return replace(layout, file_name=file_name, num_shards=3)


LAYOUTS |= {
    "vLLM's Medusa, sharded": in_shards(LAYOUTS["vLLM's Medusa"], "model.safetensors"),
    "MLP speculator, sharded": in_shards(LAYOUTS["MLP speculator"], "pytorch_model.bin"),
    "EAGLE-3, sharded": in_shards(LAYOUTS["EAGLE-3, original"], "pytorch_model.bin"),
    "speculators, sharded": in_shards(LAYOUTS["speculators"], "model.safetensors"),
}


def logits_of(head):
    """Logits of a loaded head (fp64) at the positions of Published.logits: one tensor per depth."""
    kind = type(head).__name__
    if kind == "Medusa":
        return head(FEATURES[0, :, :H], LM_HEAD)[0]
    if kind == "MLPSpeculator":
        return head(MLP_FEATURES, torch.arange(head.num_speculative_tokens)[None])[0]
    if head.needs_embedding:
        head.take_embedding(EMBEDDING.double())
    if kind == "Eagle":
        return [head(FEATURES[..., :H], TOKENS[..., 0], *one_document(T))[0] @ LM_HEAD.T]
    return [head.logits(state)[0] for state in head(FEATURES, TOKENS, *one_document(T), STEPS)]
