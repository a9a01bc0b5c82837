"""The arguments of `headstart regenerate` and of train/regenerate.py. Imports nothing heavy, so that --help stays quick."""

from ...inference.arguments import add_adapter

SUMMARY = "Let the target itself answer the conversations of a data set, as data to train its heads on."
DETAILS = (
    "Every assistant turn is written anew, each after the new answers to the turns before it; system and user turns are kept.\n"
    "What a turn gets depends on --seed and its place in the data alone: not on the other turns in flight, the number of\n"
    "processes, interruptions, or --head, which only makes it faster. Killed or stopped, the same command goes on; a file that is\n"
    "finished is never written again. Train on it with `data: OUTPUT`. Beside it, OUTPUT.made_from.json says how it was made.\n\n"
    "An answer cut at --max-tokens is kept and marked, ends its conversation, and trains no end of text; conversations that end\n"
    "early or cannot be answered are counted, by reason. With --endpoint a server that speaks OpenAI's chat completions writes\n"
    "the answers; a key is read from the environment variable OPENAI_API_KEY. It gets the same seeds, but no server promises the\n"
    "same answers for them."
)
EXAMPLES = (
    "headstart regenerate conversations.jsonl --model ORG/MODEL --output answers.jsonl\n"
    "  accelerate launch --config_file configs/accelerate/ddp.yaml train/regenerate.py conversations.jsonl \\\n"
    "      --model ORG/MODEL --head runs/first/head --output answers.jsonl      # one process per GPU\n"
    "  headstart regenerate conversations.jsonl --endpoint http://localhost:8000/v1 --model NAME --output answers.jsonl\n"
    "  headstart regenerate stdlib --model assets/stdlib-coder --num-conversations 100 --output trial.jsonl"
)


def add_options(parser):
    """Add them to an argparse parser."""
    parser.add_argument(
        "data",
        metavar="DATA",
        help="as the trainers' `data`: stdlib, installed, a .json/.jsonl/.parquet file, a `datasets` name or folder (NAME:SPLIT); "
        "prompts alone will do",
    )
    parser.add_argument(
        "--model", required=True, help="the target: a folder or Hub id; with --endpoint the server's name of it"
    )
    add_adapter(parser)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="what to write")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="of the draws. 1 (default) is the target's own distribution, the one that heads learn to foresee: its answers lead to "
        "the contexts that the head meets again in use, in the same proportions; 0 is greedy",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (default 1: all)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="keep so many likeliest tokens (default 0: all)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        help="of one answer (default 2048); no more than the trainer's row_length is of use",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws and of --num-conversations (default 0)")
    parser.add_argument(
        "--num-conversations",
        type=int,
        help="answer so many, picked at random, in the data's order (default: all); they get the answers that a whole run gives",
    )
    parser.add_argument(
        "--head", help="drafts: a head (folder, run or Hub id) for the target; same answers, sooner (default: none)"
    )
    parser.add_argument("--concurrency", type=int, default=64, help="conversations in flight, per process (default 64)")
    parser.add_argument(
        "--max-model-len", type=int, help="longest prompt + answer in tokens (default: the model's limit)"
    )
    parser.add_argument(
        "--device", default="auto", help="auto (default: each process its own GPU, if there are any), cpu, cuda ..."
    )
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16 or float32")
    parser.add_argument(
        "--endpoint", metavar="URL", help="let this server answer, e.g. http://localhost:8000/v1, not our engine"
    )
