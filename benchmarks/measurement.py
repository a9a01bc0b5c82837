"""Options shared by benchmarks on random weights, and a parser for lists of numbers."""

from ..inference.arguments import add_device

HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3", "block")  # families with random heads


def add_measurement(parser):
    """Add the options of every benchmark on random weights."""
    parser.add_argument(
        "--shape",
        "--model",
        required=True,
        help="a named shape, e.g. llama-3-8b, a folder with a config.json, or such a file: of any model that the engine runs",
    )
    parser.add_argument(
        "--output", help="write the JSON object here; a bare NAME stands for benchmarks/results/<date>-NAME.json"
    )
    parser.add_argument("--commit", help="commit of the code, if this is not a git checkout")
    add_device(parser)


def measurement(arguments):
    """Device, dtype, command line and output of a benchmark on random weights. Chooses the threads, too."""
    import torch

    from ..evaluation.results import command_line
    from ..inference.models.target_source import DTYPES, choose_device
    from ..inference.threads import choose_threads
    from .shape import config_of_shape

    device = choose_device(arguments.device)
    if arguments.dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPES)}, got {arguments.dtype!r}")
    dtype = DTYPES.get(arguments.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    choose_threads(config_of_shape(arguments.shape), device)
    command = command_line()
    return dict(device=str(device), dtype=dtype, command=command, output=arguments.output, commit=arguments.commit)


def numbers(name, text, kind=int, most=None):
    """A comma-separated list of numbers of at least 1, as a tuple."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or (most and len(found) > most):
        what = "one number" if most == 1 else "numbers separated by commas"
        raise ValueError(f"{name} takes {what} of at least 1, got {text!r}")
    return found


def at_least_one(name, number):
    """The number; ValueError naming the option if it is below 1."""
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
