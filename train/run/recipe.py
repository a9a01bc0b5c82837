"""A run's recipe: one frozen dataclass with flat fields, filled from a YAML file and from `--key value` on the command line.

    key(default, "what it does")               declares a field of the dataclass
    parse_recipe(Recipe, argv, description)    defaults < --config FILE < --key value

Values are scalars: str, int, float and bool. There is no nesting and no interpolation; one key, `several`, may be a list in YAML.
"""

import math
import os
import sys
from dataclasses import MISSING, field, fields
from pathlib import Path

import yaml

from ...heads.storage.atomic_write import write_whole
from ...heads.storage.keywords import reject_unknown


def key(default, help, least=None, most=None, choices=None, several=False):
    """A field of a recipe: its default (MISSING if it must be given), its explanation for --help, its allowed values.

    several: a text that names several things with commas between; a YAML file may list them, each `name` or `name: number`
    """
    allowed = {"least": least, "most": most, "choices": choices, "several": several}
    return field(default=default, metadata={"help": help, **allowed})


def check_values(recipe):
    """Raise ValueError for a value that its key does not allow. A recipe's __post_init__ calls it."""
    for f in fields(recipe):
        value, allowed = vars(recipe)[f.name], f.metadata
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{f.name} must be finite, got {value!r}")
        if allowed["least"] is not None and value < allowed["least"]:
            raise ValueError(f"{f.name} must be at least {allowed['least']}, got {value!r}")
        if allowed["most"] is not None and value > allowed["most"]:
            raise ValueError(f"{f.name} must be at most {allowed['most']}, got {value!r}")
        if allowed["choices"] is not None and value not in allowed["choices"]:
            raise ValueError(f"{f.name} must be one of {', '.join(allowed['choices'])}, got {value!r}")
        if f.default is MISSING and isinstance(value, str) and not value.strip():
            raise ValueError(f"{f.name} must be given, got an empty text")


def parse_recipe(recipe_class, argv, description):
    """The recipe that `argv` (list of str) asks for. `--help` prints every key and leaves with status 0.

    Raises ValueError for an unknown key (naming the nearest), a value of the wrong type, a missing required key, and a
    config file that is missing or not flat YAML.
    """
    known = {f.name: f for f in fields(recipe_class)}
    if "--help" in argv or "-h" in argv:
        print(help_text(recipe_class, description))
        sys.exit(0)
    given, configs = {}, []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--") or word == "--":
            raise ValueError(f"expected --key value, got {word!r}; --help lists the keys")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        reject_unknown([name], ["config", *known], "key")
        if not equals:
            follows = position < len(argv) and not argv[position].startswith("--")
            if follows:
                value = argv[position]
                position += 1
            elif name != "config" and known[name].type in (bool, "bool"):
                value = "true"
            else:
                raise ValueError(f"--{name} needs a value: see --help")
        if name == "config":
            configs.append(value)
        else:
            given[name] = convert(known[name], value, f"--{name}")
    values = {}
    for path in configs:
        values |= read_config(recipe_class, path)
    values |= given
    missing = [name for name, f in known.items() if f.default is MISSING and name not in values]
    if missing:
        raise ValueError(f"these keys have no default and must be given: {', '.join(missing)}; --help explains them")
    return recipe_class(**values)


def read_config(recipe_class, path):
    """The keys of a YAML file, converted to the types of the fields."""
    if not os.path.isfile(path):
        raise ValueError(f"config file {path!r} does not exist; the shipped ones lie in configs/")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"config file {path!r} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"config file {path!r} must hold lines of `key: value`, got a {type(content).__name__}")
    known = {f.name: f for f in fields(recipe_class)}
    reject_unknown(content, known, f"key in {path}")
    return {name: convert(known[name], value, f"{path}: {name}") for name, value in content.items()}


def convert(declared, value, where):
    """`value` (from YAML or the command line) as the type of the field `declared`."""
    wanted = declared.type if isinstance(declared.type, str) else declared.type.__name__
    if isinstance(value, list) and declared.metadata["several"]:
        value = ",".join(_listed(item, where) for item in value)
    text = str(value).strip()
    try:
        if wanted == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        # YAML 1.1 reads 1e-3 as a string and a bare 1 as an int: both are fine floats here.
        if wanted == "float" and not isinstance(value, bool):
            return float(text)
        if wanted == "int" and not isinstance(value, bool):
            number = float(text)
            if number == int(number):
                return int(text) if text.lstrip("+-").isdigit() else int(number)
        if wanted == "str" and isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        if wanted == "str" and isinstance(value, bool):  # YAML 1.1 reads `autocast: no` as a bool
            return "yes" if value else "no"
        if wanted == "str" and value is None:
            return ""
    except (ValueError, OverflowError):
        pass
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
    raise ValueError(f"{where} must be {names[wanted]}, got {value!r}")


def _listed(item, where):
    """An item of a list as text: "name", or "name:number" of {name: number}."""
    pair = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
    if isinstance(pair[0], str) and not isinstance(pair[1], bool) and isinstance(pair[1], int | float | None):
        return pair[0] if pair[1] is None else f"{pair[0]}:{pair[1]}"
    raise ValueError(f"{where} must list texts, or texts with a number as `- NAME: 0.5`, got {item!r}")


def parse_layers(text):
    """ "1,4,7" as a tuple of int, an empty text as None; ValueError for anything else."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdigit() for word in words):
        raise ValueError(f"aux_layers must be layer numbers with commas between them, as 2,16,29, got {text!r}")
    return tuple(int(word) for word in words) or None


def resolved_values(recipe):
    """All fields as a dict, in order. It avoids attribute access, so it does not count as reading a field."""
    return dict(vars(recipe))


def save_recipe(values, path):
    """Write every key with its value as YAML that --config reads again."""
    write_whole(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def help_text(recipe_class, description):
    """The description, then each key with its default and explanation."""
    lines = [
        description.strip(),
        "",
        "keys (in the config file as `key: value`, on the command line as --key value):",
        "",
    ]
    lines.append("  --config FILE\n      a YAML file of keys; the command line wins over it")
    for f in fields(recipe_class):
        default = "required" if f.default is MISSING else f"default {f.default!r}"
        lines.append(f"  --{f.name} ({default})\n      {f.metadata['help']}")
    return "\n".join(lines)
