"""Code that a model brings along: found before anything runs it, and run only if the caller says so.

A config.json with `auto_map` names classes in Python files beside it. The engine takes the library's own class wherever the library
knows the model type. Otherwise the files must be run, which `trust_remote_code=True` allows, and which is then said.
"""

import functools
import warnings

# What transformers calls the package that holds the code of models.
PACKAGE = "transformers_modules"
ADVICE = (
    "read it, and if you trust it, give LLM(trust_remote_code=True), or --trust-remote-code to generate, serve and "
    "verify-lossless, or the model loaded by AutoModelForCausalLM.from_pretrained with trust_remote_code=True"
)


def config_code(name, trusted, advice=ADVICE, **options):
    """Whether the config of a folder or Hub id is of a class in the model's own code, which `trusted` allows to run.

    options: for the Hub. False, too, where there is no config to read. Raises ValueError, in one line, if such code may not be run,
    and if nobody knows the model type.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

    try:
        content, _ = PreTrainedConfig.get_config_dict(name, **options)
    except (OSError, ValueError):  # whoever reads it says what is wrong with it
        return False
    kind, classes = content.get("model_type"), content.get("auto_map") or {}
    if kind in CONFIG_MAPPING or (kind is None and not classes):
        return False
    if "AutoConfig" not in classes:
        raise ValueError(
            f"the engine does not run model type {kind!r}: transformers {__version__} does not know it, and {name} brings no code "
            "of its own for it"
        )
    files = ", ".join(str(classes[key]) for key in ("AutoConfig", "AutoModelForCausalLM") if key in classes)
    if not trusted:
        raise ValueError(
            f"{name} is of model type {kind!r}, which transformers {__version__} does not know, and brings code of its own for it "
            f"({files}). That code is not run: {advice}"
        )
    _say(f"code of {name} is run ({files}), as trust_remote_code=True allows")
    return True


def check_config_code(config, trusted):
    """ValueError for a config of a class in a model's own code, unless `trusted` allows to run the model's code, too."""
    if not is_remote(type(config)):
        return
    kind, named = type(config).__name__, getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if not trusted:
        raise ValueError(
            f"{kind} is defined in the model's own code, and random weights for it would be made by more of that code ({named}). "
            "That code is not run: read it, and if you trust it, give LLM(trust_remote_code=True)"
        )
    _say(f"code of {kind} is run ({named}), as trust_remote_code=True allows")


def tokenizer_code(name, trusted, **options):
    """Whether code of a folder or Hub id may be run for its tokenizer: it has some, and `trusted` allows it."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    classes = get_tokenizer_config(name, **options).get("auto_map") or {}
    found = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    if not (trusted and found):
        return False
    files = ", ".join(filter(None, [found] if isinstance(found, str) else found))
    _say(f"code of {name} is run for its tokenizer ({files}), as trust_remote_code=True allows")
    return True


@functools.cache
def _say(text):
    warnings.warn(text, stacklevel=2)


def is_remote(kind):
    """Whether a class is defined in a model's own code. That of a loaded module was run with its user's consent."""
    return kind.__module__.partition(".")[0] == PACKAGE


def check_same_code(module):
    """ValueError for a loaded module of a class of its own on a config of the library's: the library's class is another model."""
    if is_remote(type(module)) and not is_remote(type(module.config)):
        raise ValueError(
            f"{type(module).__name__} is defined in the model's own code, and its config is the library's "
            f"{type(module.config).__name__}: the engine cannot tell how it differs from the library's {module.config.model_type}"
        )
