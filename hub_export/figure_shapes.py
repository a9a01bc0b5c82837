"""What figures look like that come along with a head: checked once where they are read, for they may be a stranger's.

A shape is a type or several; [shape]: a list of such; {"name": shape}: a mapping where those names, if they are there, are such,
and "name!" must be. Null is as good as absent. Names that no shape knows are left alone.
"""

NUMBER = (int, float)
RATES = [[NUMBER]]
FIGURE = {
    "temperature": NUMBER,
    "acceptance_length": NUMBER,
    "per_position": [NUMBER],
    "num_steps": int,
    "source": str,
    "prompts": str,
    "num_prompts": int,
    "max_tokens": int,
    "dtype": str,
    "hardware": str,
    "date": str,
    "by_request": [[int]],
    "rates": RATES,
}
ROW = dict.fromkeys(("temperature", "num_nodes", "acceptance_length", "tokens_per_second", "speedup"), NUMBER)
BENCHMARK = {"hardware": str, "date": str, "command": str, "rows": [ROW]}
TREE = {
    "rates": RATES,
    "expected_acceptance_length": NUMBER,
    "choice": {"batch_size!": int, "hardware!": str, "dtype!": str},
}
ORIGIN = {"name!": str, "revision": str, "on_hub!": bool, "again": bool}
MEASURED = FIGURE | {"acceptance_length!": NUMBER, "per_position!": [NUMBER]}  # acceptance.json
LINE = {"step!": int, "kind": str, "loss": NUMBER}  # of metrics.jsonl
REPLAY = {
    "acceptance": [MEASURED | {"temperature!": NUMBER}],
    "prompts": [[int]],
    "rates": RATES,
    "benchmark": BENCHMARK,
    "recipe": dict,
    "step": int,
    "origin": ORIGIN,
}
VERIFIED = REPLAY | dict.fromkeys(("files!", "config!", "tensors!"), dict)
VERIFIED |= {"acceptance!": REPLAY["acceptance"], "drawn!": [dict], "target": dict}
WORDS = {int: "a whole number", NUMBER: "a number", str: "a string", bool: "true or false", dict: "an object"}


def check_shape(value, shape, where):
    """ValueError naming the place in the file `where` that is not of the shape."""
    found = _misfit(value, shape, "")
    if found:
        place, expected, given = found
        raise ValueError(
            f"{where}: {place.strip('.')} should be {expected}, found {given!r:.60}: mend it or move it away"
        )


def _misfit(value, shape, place):
    """(place, what is expected, what stands there) of the first misfit, or None."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return place, "a list", value
        inside = ((one, shape[0], f"{place}[{i}]", True) for i, one in enumerate(value))
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            return place, "an object", value
        names = ((key.rstrip("!"), key.endswith("!"), of) for key, of in shape.items())
        inside = ((value.get(name), of, f"{place}.{name}", must) for name, must, of in names)
    else:
        return None if isinstance(value, shape) else (place, WORDS[shape], value)
    found = (_misfit(one, of, where) for one, of, where, must in inside if must or one is not None)
    return next(filter(None, found), None)
