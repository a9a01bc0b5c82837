"""`headstart regenerate`: the target answers a data set. The same as `train/regenerate.py`, without a launcher."""

from ..train.data import regenerate_options

EXAMPLE, DETAILS = regenerate_options.EXAMPLES, regenerate_options.DETAILS
add_options = regenerate_options.add_options


def run(arguments):
    from ..train.regenerate import regenerate

    return regenerate(arguments)
