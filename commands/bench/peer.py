"""`headstart bench peer`: compare Headstart with transformers' own `generate` on the same model."""

from ...benchmarks.measurement import add_measurement, at_least_one, measurement, numbers

EXAMPLE = "headstart bench peer --shape llama-3-8b --batch 1"
DETAILS = (
    "Milliseconds between tokens. start: time until everything is compiled and warm. agreeing: number of equal tokens\n"
    "of an output before the first near-tie is decided differently."
)


def add_options(parser):
    parser.add_argument("--batch", default="1", help="requests at once (default 1)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt (default 1000)")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of an output (default 64)")
    add_measurement(parser)


def run(arguments):
    from ...benchmarks.engine.peer import PeerSettings, bench_peer

    settings = PeerSettings(
        shape=arguments.shape,
        batches=numbers("--batch", arguments.batch),
        prompt_tokens=at_least_one("--prompt-tokens", arguments.prompt_tokens),
        new_tokens=at_least_one("--new-tokens", arguments.new_tokens),
    )
    bench_peer(settings, **measurement(arguments))
