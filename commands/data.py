"""`headstart data`: what a data set holds, before one trains on it."""

EXAMPLE = (
    "headstart data chats.jsonl\n  headstart data OWNER/NAME:train_sft --tokenizer OWNER/TARGET --row-length 4096\n"
    '  headstart data "parts/*.jsonl.gz" --tokenizer runs/target --json\n'
    "  headstart data a.jsonl:0.7,b.jsonl:0.3 --tokenizer OWNER/TARGET"
)
DETAILS = (
    "Counts conversations, messages, turns and characters, and says which records are left out and why. With --tokenizer, also\n"
    "tokens, the share that is supervised, what is split or cut off to fit into a row, and what the chat template does not write.\n"
    "Of several data sets, the share of an epoch that each gives."
)


def add_options(parser):
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a file, a pattern of files, a folder or a name, or several with weights, as --data of the trainers",
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="the target, or another folder or Hub id with its tokenizer"
    )
    parser.add_argument("--row-length", type=int, default=1024, help="tokens per packed row (default 1024)")
    parser.add_argument(
        "--document",
        choices=("conversation", "answer", "text"),
        default="conversation",
        help="what is packed, as --document of the trainers (default conversation)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the tokenizer brings along")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments):
    from ..train.data.survey import print_survey

    if arguments.row_length < 2:
        raise ValueError(f"--row-length must be at least 2, got {arguments.row_length}")
    print_survey(
        arguments.data,
        arguments.tokenizer,
        arguments.row_length,
        as_json=arguments.json,
        document=arguments.document,
        trust_remote_code=arguments.trust_remote_code,
    )
    return 0
