"""Bytes of weights that drafting reads, part by part, each weight once; a few rows of an embedding are not counted.

Asked of the head's module alone (it may be on any device, the meta one too): benchmarks hold it against the rate of memory
(benchmarks/floor.py), `headstart inspect` shows it.
"""

from ...heads.families import family_of


def draft_bytes(head, lm_head_bytes):
    """Bytes per part: {"first": behind the root, "level": each further depth, "advance": the pass after a step}.

    What a head has not is left out: Medusa heads draft all depths at once ("first"), only EAGLE heads have keys and values to
    compute after a step. lm_head_bytes: of the target's lm_head, for heads that have none of their own.
    """
    family = family_of(head)
    if family == "Medusa":
        return {"first": _bytes(head) + (lm_head_bytes if head.config.shared_lm_head else 0)}
    if family == "MLP speculator":
        own = _bytes(head.ln[0]) + _bytes(head.head[0])
        return {"first": own + _bytes(head.proj[0]), "level": own + _bytes(head.proj[-1])}
    joined = _bytes(head.fc)
    if family == "EAGLE-3":
        # Its own states skip fc, which only joins the target's streams.
        layer, lm_head = _bytes(head.midlayer), _bytes(head.norm) + _bytes(head.lm_head)
        return {"first": lm_head, "level": layer + lm_head, "advance": joined + layer}
    layer = _bytes(head.layers)
    return {"first": lm_head_bytes, "level": joined + layer + lm_head_bytes, "advance": joined + layer}


def _bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())
