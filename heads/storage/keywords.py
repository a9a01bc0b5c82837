"""Accept or refuse keywords by name: keywords of vLLM that are not ours, and misspellings. No torch."""

import difflib
from dataclasses import dataclass

import numpy as np

ANY = ("any value",)  # of an argument that changes no output here, whatever it is


@dataclass(frozen=True)
class Theirs:
    """A keyword of vLLM that is none of ours.

    accepts: values that ask for nothing else than is done here, or ANY; words: for ANY what is done here, else what to do instead.
    """

    name: str
    accepts: tuple
    words: str

    def takes(self, value):
        """Whether this value asks for nothing else than is done."""
        value = python_value(value)
        return self.accepts is ANY or any(type(value) is type(known) and value == known for known in self.accepts)


def python_value(value):
    """The value with Python's own numbers in place of numpy's, also in lists, tuples, sets and dicts."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple | set):
        return type(value)(map(python_value, value))
    return {python_value(k): python_value(v) for k, v in value.items()} if type(value) is dict else value


def reject_unknown(given, known, what, theirs=(), whose="vLLM's"):
    """Raise ValueError if `given` (a dict, or names only where there is no `theirs`) holds a name that is not in `known`.

    what: words for these keywords in the error; theirs: a tuple of Theirs, keywords of vLLM (`whose`), taken at the values that
    they accept.
    """
    rows = {row.name: row for row in theirs}
    for name in given:
        if name in known:
            continue
        if name in rows:
            if not rows[name].takes(given[name]):
                raise ValueError(
                    f"{what} {name!r} is {whose} and not supported here (got {given[name]!r:.60}): {rows[name].words}"
                )
            continue
        raise ValueError(f"unknown {what} {name!r}; {_hint(str(name), list(known))}")


def meant(name, known):
    """The known name that a misspelled one stands for, None if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)


def _hint(name, known):
    """The name that was meant, all names if they are few, else the three nearest."""
    if nearest := meant(name, known):
        return f"did you mean {nearest!r}?"
    if len(known) <= 4:
        return f"known are {', '.join(known)}"
    first, second, third = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"the nearest of {len(known)} known ones are {first!r}, {second!r} and {third!r}"
