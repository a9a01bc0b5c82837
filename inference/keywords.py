"""Refuse unknown keywords by name, with the nearest known one. No torch."""

import difflib


def reject_unknown(given, known, what):
    """Raise ValueError if `given` (names) holds one that `known` does not; `what` says whose keywords they are."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")
