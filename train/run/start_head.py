"""Begin with another head: of a run, of a checkpoint, exported, or published in any format that is read (`start_from`)."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from ...heads.checkpoint import check_head_fits, describe_choice, load_head, resolve_head
from ...heads.families import family_of

# Tables that differ by no more are one table in another dtype: half a unit of bfloat16, and what float16 loses near 0.
_ROUNDING = {"rtol": 2.0**-8, "atol": 1e-7}
_COMPARED_ROWS = 8192  # at once


def load_start(start_from, kind, *, called, note):
    """The head in `start_from` (run, checkpoint, folder or Hub id), in fp32; `note(text)` is told which one of a run it is.

    Raises ValueError if it is not a `kind`, or was trained with an adapter.  called: the name of such a head, for the error
    """
    head = load_head(start_from, dtype="float32")
    if Path(start_from).is_dir() and (choice := describe_choice(start_from, resolve_head(start_from))):
        note(f"start_from {choice}")
    if not isinstance(head, kind):
        raise ValueError(f"start_from {start_from!r} holds a head of the family {family_of(head).name}, not {called}")
    if head.adapter:
        raise ValueError(f"start_from {start_from!r} was trained with an adapter already: give heads of stage heads")
    return head


def load_layer_start(recipe, processes, kind, target, *, called):
    """The EAGLE head that the recipe starts from, as `load_start` gives it; None if it names none.

    Its config, not the target's, says what the layer is like. The checkpoint of a resumed run holds that config too, so the start
    is not read again. Raises ValueError if the head was made for another target.
    """
    if not recipe.start_from:
        return None
    head = load_start(str(processes.resumed or recipe.start_from), kind, called=called, note=processes.note)
    try:
        check_head_fits(head, target.model.config)
        head.take_depth(target.num_layers)
    except ValueError as error:
        raise ValueError(f"start_from {recipe.start_from!r}: {error}") from None
    return head


def head_with_vocabulary(recipe, processes, start, kind):
    """The head whose draft vocabulary a run keeps: its checkpoint's, or that of `start` unless the recipe gives a size; or None.

    It must be there before the engine that measures is built, which copies it; other weights of a checkpoint are loaded later.
    """
    if processes.resumed and not start:
        start = load_head(str(processes.resumed))
    keeps = start and (processes.resumed or not recipe.draft_vocab_size)
    return start if keeps and isinstance(start, kind) else None


def check_same_shape(start, config, start_from, has="has"):
    """ValueError if the config of `start` is not `config`, apart from the target's name.  has: the verb before what differs"""
    for field in fields(config):
        found, wanted = getattr(start.config, field.name), getattr(config, field.name)
        if found != wanted and field.name != "base_model_name_or_path":
            raise ValueError(f"start_from {start_from!r} {has} {field.name} {found!r}, this run asks for {wanted!r}")


@torch.no_grad()
def take_weights(head, start, note):
    """Copy the weights of `start`, an EAGLE head, into `head`, which has its shape and was started from the target.

    If its draft vocabulary is another, the rows of lm_head are copied for the tokens that are in both; `note(text)` is told their
    number. A frozen embedding that is not the target's is kept, and not trained.
    """
    if head.embedding_is_targets and not _has_table(start, head.embed_tokens.weight):
        head.embed_tokens, head.embedding_is_targets = nn.Embedding.from_pretrained(start.embed_tokens.weight), False
        note("the head's embedding is not the target's: it is kept as it is")
    held = dict(start.named_parameters())
    if new := [name for name, weight in head.named_parameters() if weight.requires_grad and name not in held]:
        note(f"new, as the start has none: {', '.join(new)}")
    for name, weight in head.named_parameters():
        if name not in held or (name == "embed_tokens.weight" and not weight.requires_grad):
            continue  # of the target, or new
        given = held[name]
        if name != "lm_head.weight":
            weight.copy_(given)
            continue
        places = torch.full((head.config.vocab_size,), -1)
        places[_drafted(start)] = torch.arange(len(given))
        places = places[_drafted(head)]  # of each draft token in the start, or -1
        weight[places >= 0] = given[places[places >= 0]]
        if (places < 0).any():
            note(
                f"{int((places >= 0).sum())} of {len(places)} draft tokens are the start's; the others begin with the target's "
                "rows of lm_head"
            )


def _has_table(start, table):
    """Whether the target's embedding `table` [V, H] is the embedding of `start`, in whatever dtype."""
    if start.needs_embedding or start.embedding_is_targets:
        return True
    pairs = zip(start.embed_tokens.weight.split(_COMPARED_ROWS), table.split(_COMPARED_ROWS), strict=True)
    return all(torch.allclose(one.to(other.device), other.float(), **_ROUNDING) for one, other in pairs)


def _drafted(head):
    """The target's ids of the tokens that a head drafts."""
    ids = head.draft_token_ids
    return torch.arange(head.config.vocab_size) if ids is None else ids
