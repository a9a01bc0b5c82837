"""Load the head of another run, for a run that starts from it (`start_from`)."""

from dataclasses import fields

from ...heads.checkpoint import load_head
from ...heads.families import family_of


def load_start(start_from, kind, config, *, called, has="has"):
    """The head in `start_from` (run, checkpoint, folder or Hub id), in fp32.

    Raises ValueError if it is not a `kind`, was trained with an adapter, or has another shape than `config`. For the error, called:
    the name of such a head; has: the verb before a field that differs.
    """
    head = load_head(start_from, dtype="float32")
    if not isinstance(head, kind):
        raise ValueError(f"start_from {start_from!r} holds a head of the family {family_of(head).name}, not {called}")
    if head.adapter:
        raise ValueError(f"start_from {start_from!r} was trained with an adapter already: give heads of stage heads")
    for field in fields(config):
        found, wanted = getattr(head.config, field.name), getattr(config, field.name)
        if found != wanted and field.name != "base_model_name_or_path":
            raise ValueError(f"start_from {start_from!r} {has} {field.name} {found!r}, this run asks for {wanted!r}")
    return head
