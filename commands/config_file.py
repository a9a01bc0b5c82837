"""`headstart serve --config FILE.yaml`: options in a file, under their names without the dashes before them.

    model: assets/stdlib-coder
    head: assets/stdlib-coder-medusa
    tree: static
    served-model-name: [coder, gpt]
    speculative-config: {...}                # as JSON on the command line

The command line wins. They become words of it, before those that were typed, and are checked in the same way, first by themselves,
so that an error names the file.
"""

import json
from pathlib import Path

from ..heads.storage.keywords import reject_unknown
from ..heads.storage.user_errors import CommandParser
from . import serve, vllm_serve

REPEATED = ("api-key",)  # options that are given again for every value


def with_config(argv):
    """The words of a command line, with those of the file that --config names.

    Raises ValueError for a file that does not fit, and ends the command with one line for a value that an option does not take.
    """
    if argv[:1] != ["serve"] or not any(word.partition("=")[0] == "--config" for word in argv):
        return argv
    parser = CommandParser(prog="headstart serve", add_help=False)
    serve.add_options(parser)
    typed, _ = parser.parse_known_args([word for word in argv[1:] if word not in ("-h", "--help")])
    if typed.config is None:
        return argv
    known = {option.removeprefix("--") for option in parser._option_string_actions if option.startswith("--")} - {
        "config"
    }
    content = {str(key).replace("_", "-"): value for key, value in _read(typed.config).items()}
    if told := vllm_serve.why_refused([f"--{name}" for name in content if name not in known]):
        raise ValueError(f"{typed.config}: {told}")
    reject_unknown(content, known, f"option of {typed.config}")
    if typed.model_tag:
        content.pop("model", None)
    words = [word for name, value in content.items() for word in _words(name, value, parser)]
    parser.source = typed.config
    parser.parse_args(words)  # ends the command if a value is wrong, and names the file
    # --config comes after them, so that an option of several values does not take MODEL for one of its own.
    return ["serve", *words, f"--config={typed.config}", *argv[1:]]


def _read(path):
    """The mapping of a YAML file."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold names of options with their values, got {content!r:.80}")
    return content


def _words(name, value, parser):
    """An option as words of a command line.  parser: of `headstart serve`"""
    option = f"--{name}"
    if value is None or value is False:
        # --no-NAME where there is one; a switch that is off is left out.
        off = f"--no-{name}"
        return [off] if value is False and not parser.parse_known_args([off])[1] else []
    if value is True:
        return [option]
    if isinstance(value, dict):
        return [f"{option}={json.dumps(value)}"]
    if isinstance(value, list):
        values = [str(one) for one in value]
        return [f"{option}={one}" for one in values] if name in REPEATED else [option, *values]
    return [f"{option}={value}"]
