"""The arguments of `headstart regenerate` and of train/regenerate.py. Imports nothing heavy, so that --help stays quick."""

from ...inference.arguments import add_adapter

SUMMARY = "Let the target itself answer the conversations of a data set, as data to train its heads on."
DETAILS = (
    "The target writes every assistant turn anew, after its own answers to the turns before; system and user turns are kept.\n"
    "An answer depends only on --seed and its place in the data: not on the other turns in flight, the number of processes,\n"
    "interruptions, or --head, which only makes it faster. If the command is killed or stopped, run it again to go on; a finished\n"
    "file is never written again. Train on it with `data: OUTPUT`. OUTPUT.made_from.json beside it records how it was made.\n\n"
    "An answer cut at --max-tokens is kept and marked, ends its conversation, and trains no end of text. Conversations that end\n"
    "early or cannot be answered are counted, by reason. With --endpoint a server that speaks OpenAI's chat completions writes\n"
    "the answers; the key is read from the environment variable OPENAI_API_KEY. The server gets the same seeds, but no server\n"
    "promises the same answers for them."
)
EXAMPLES = (
    "headstart regenerate conversations.jsonl --model ORG/MODEL --output answers.jsonl\n"
    "  accelerate launch --config_file configs/accelerate/ddp.yaml train/regenerate.py conversations.jsonl \\\n"
    "      --model ORG/MODEL --head runs/first/head --output answers.jsonl      # one process per GPU\n"
    "  headstart regenerate conversations.jsonl --endpoint http://localhost:8000/v1 --model NAME --output answers.jsonl\n"
    "  headstart regenerate stdlib --model assets/stdlib-coder --num-conversations 100 --output trial.jsonl"
)


def add_options(parser):
    """Add the options to an argparse parser."""
    parser.add_argument(
        "data",
        metavar="DATA",
        help="as the trainers' `data`: stdlib, installed, a .json/.jsonl/.parquet file or a pattern of them, a `datasets` "
        "name or folder (NAME:SPLIT); prompts without answers are enough",
    )
    parser.add_argument(
        "--model", required=True, help="the target: a folder or Hub id; with --endpoint the server's name of it"
    )
    add_adapter(parser)
    parser.add_argument("--output", required=True, metavar="FILE.jsonl", help="the file to write")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="temperature of the draws. 1 (default) is the target's own distribution, which heads learn to predict: its answers "
        "lead to the contexts that the head meets in use, in the same proportions; 0 is greedy",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (default 1: all)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="number of likeliest tokens to keep (default 0: all)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        help="longest answer in tokens (default 2048); more than the trainer's row_length is of no use",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws and of --num-conversations (default 0)")
    parser.add_argument(
        "--num-conversations",
        type=int,
        help="number of conversations to answer, picked at random, in the data's order (default: all); the answers are those of a "
        "whole run",
    )
    parser.add_argument(
        "--head", help="a head (folder, run or Hub id) that drafts for the target: same answers, sooner (default: none)"
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
