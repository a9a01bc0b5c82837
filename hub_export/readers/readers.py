"""Who reads a head's files, as they are: for the model card of files that we write, and for `headstart inspect` of files as found.

What a reader asks is said once, in hub_export/readers/rules.py; here is who there is, what each calls its formats, and which format
mends what is wrong.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ...heads.families import SAFETENSORS_FILE, TORCH_FILE, check_format, family_of, to_file
from . import rules as rules
from .rules import LAYOUT, NO, NOTE, WRONG, HeadFiles

VLLM, TGI, SGLANG = "vLLM", "text-generation-inference", "SGLang"


@dataclass(frozen=True)
class Reader:
    """A project that reads heads of a family: `formats` are its own, the first the best; none: it reads none of the family."""

    name: str
    formats: dict = field(default_factory=dict)  # format -> what the card says where nothing is wrong
    rule: Callable | None = None  # HeadFiles -> problems; None: nothing beyond the format
    others: dict = field(default_factory=dict)  # format -> another rule


NO_SUPPORT = {"Medusa": "no Medusa support", "MLP speculator": "no support of MLP speculators"}
READERS = {
    "Medusa": (
        Reader(
            "the original Medusa code (FasterDecoding)",
            {
                "medusa": "yes, through `medusa_lm_head.pt`",
                "medusa-shared": "by its legacy class, through `medusa_lm_head.pt`",
            },
            rules.original_medusa,
        ),
        Reader(
            TGI,
            dict.fromkeys(("medusa", "medusa-shared"), "yes, through `medusa_lm_head.safetensors`"),
            rules.tgi_medusa,
        ),
        Reader(VLLM, {"vllm": "0.20 to 0.32 (0.33 removed Medusa)"}, rules.vllm_medusa),
        Reader(SGLANG),
    ),
    "MLP speculator": (
        Reader(TGI, {"mlp-speculator": "yes"}, rules.tgi_mlp_speculator),
        Reader(VLLM, {"mlp-speculator": "to 0.9"}, rules.mlp_speculator),
        Reader("fms-extras", {"mlp-speculator": "yes"}, rules.mlp_speculator),
        Reader(SGLANG),
    ),
    "EAGLE": (
        Reader(VLLM, {"eagle-vllm": "yes"}, rules.vllm_eagle),
        Reader(SGLANG, {"eagle-sglang": "yes"}, rules.sglang_eagle),
        Reader("the original EAGLE code", {"eagle-vllm": "yes"}, rules.original_eagle),
        Reader(TGI),
    ),
    "EAGLE-3": (
        Reader(
            VLLM, {"eagle3": "yes", "speculators": "yes"}, rules.vllm_eagle3, {"speculators": rules.vllm_speculators}
        ),
        Reader(SGLANG, {"eagle3": "yes"}, rules.sglang_eagle3),
        Reader("the original EAGLE code", {"eagle3": "yes"}, rules.original_eagle3),
        Reader("the `speculators` library", {"speculators": "yes"}, rules.speculators_library),
        Reader(TGI),
    ),
}

# format -> the method to name to vLLM, and the versions that read it.
VLLM_METHODS = {
    "vllm": ("medusa", "vLLM 0.20 to 0.32 (which drafts chains, with sampling rules of its own)"),
    "eagle-vllm": ("eagle", "vLLM"),
    "eagle3": ("eagle3", "vLLM"),
    "speculators": ("eagle3", "vLLM"),
}


@dataclass(frozen=True)
class Verdict:
    """Whether a reader takes some files, and what would go wrong.

    loads: whether it loads them at all, and drafts; problems: of rules.py, no notes among them; how: what the card says
    where there are none; mend: the format to export in that mends it, or None; stays: the problems that it leaves.
    """

    reader: str
    loads: bool
    problems: tuple = ()
    notes: tuple = ()
    how: str = "yes"
    mend: str | None = None
    stays: tuple = ()


def readers_table(head, format):
    """Rows of (reader, what it takes) for this head as we write it in this format."""
    written = files_as_written(head, format)
    word = "dialect" if family_of(head).name == "EAGLE" else "layout"
    return [("Headstart", "yes"), *((verdict.reader, _in_words(verdict, word)) for verdict in judge(written))]


def _in_words(verdict, word):
    kinds, sentences = [kind for kind, _ in verdict.problems], "; ".join(text for _, text in verdict.problems)
    if verdict.loads:
        return f"{verdict.how}, but {sentences}" if sentences else verdict.how
    if LAYOUT in kinds and verdict.mend:
        return f"not this {word}: export with `--format {verdict.mend}`"
    return f"no: {sentences}" if kinds else verdict.how


def judge(files):
    """A Verdict of every reader of the family on HeadFiles."""
    readers = READERS[family_of(files.head).name]
    # The files of every format that somebody reads and that can hold this head.
    exports = {
        format: _naming_a_target(files_as_written(files.head, format, files.num_layers))
        for format in dict.fromkeys(format for reader in readers for format in reader.formats)
        if _can_be_written(files.head, format)
    }
    return [_verdict(reader, files, exports) for reader in readers]


def _verdict(reader, files, exports):
    if not reader.formats:
        return Verdict(reader.name, False, how=NO_SUPPORT.get(family_of(files.head).name, "no EAGLE support"))
    found = _problems(reader, files)
    written = {format: _problems(reader, exports[format]) for format in reader.formats if format in exports}
    best = min(written, key=lambda format: _badness(written[format]), default=None)
    helps = best is not None and not _badness(written[best])[0] and _badness(written[best]) < _badness(found)
    mend = best if helps else None
    problems = [problem for problem in found if problem[0] != NOTE]
    if any(kind == LAYOUT for kind, _ in found):
        # What is wrong with the head itself counts, whatever the layout.
        inherent = [problem for problem in written.get(best, ()) if problem[0] in (NO, WRONG)]
        problems += [problem for problem in inherent if problem not in problems]
        if mend is None and any(kind == NO for kind, _ in problems):
            problems = [problem for problem in problems if problem[0] == NO]
    notes = tuple(text for kind, text in found if kind == NOTE)
    loads = not any(kind in (LAYOUT, NO) for kind, _ in found)
    stays = tuple(problem for problem in written[mend] if problem[0] != NOTE) if mend else ()
    return Verdict(reader.name, loads, tuple(problems), notes, reader.formats.get(files.format, "yes"), mend, stays)


def _problems(reader, files):
    """All problems of one reader with some files, notes among them."""
    family, rule = family_of(files.head).name, reader.others.get(files.format, reader.rule)
    found = [(LAYOUT, f"it knows no tensors whose names begin with {files.prefix!r}")] if files.prefix else []
    # The dialects of EAGLE heads differ in a key and a tensor, which its rules ask for.
    if files.format in reader.formats or family == "EAGLE":
        return found + list(rule(files))
    found.append((LAYOUT, f"it reads the format {' or '.join(reader.formats)}"))
    if family == "EAGLE-3":  # whose layouts are alike enough to tell what the reader could not compute in its own
        found += [problem for problem in rule(files) if problem[0] == NO]
    return found


def _naming_a_target(files):
    """As an export with --base-model writes them, where the head names no target."""
    config = files.config | {"base_model_name_or_path": files.head.config.base_model_name_or_path or "OWNER/NAME"}
    if "speculators_config" in config:
        verifier = {"name_or_path": config.pop("base_model_name_or_path")}
        config["speculators_config"] = config["speculators_config"] | {"verifier": verifier}
    return replace(files, config=config)


def _badness(problems):
    kinds = [kind for kind, _ in problems]
    return LAYOUT in kinds or NO in kinds, kinds.count(NO), kinds.count(WRONG)


def _can_be_written(head, format):
    try:
        with _embedding_of(head, format):
            check_format(head, format)
    except ValueError:
        return False
    return True


def files_as_written(head, format, num_layers=None):
    """HeadFiles of an export of `head`, without writing one; ValueError where `format` cannot hold it."""
    with _embedding_of(head, format):
        config = head.config
        dtype = next(head.parameters()).dtype
        # Its values are never looked at: memory that nobody touches.
        lm_head = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype) if format == "vllm" else None
        tensors, said = to_file(head, format, lm_head)
    names = {"config.json", SAFETENSORS_FILE[format], TORCH_FILE.get(format, "config.json")}
    return HeadFiles(head, format, said, frozenset(tensors), frozenset(names), num_layers=num_layers)


@contextmanager
def _embedding_of(head, format):
    """An export as "speculators" takes the target's embedding along, where a head has none: one of zeros stands for it here."""
    borrowed = format == "speculators" and head.needs_embedding
    if borrowed:
        head.take_embedding(torch.zeros(head.config.vocab_size, head.config.hidden_size))
        head.embedding_is_targets = False
    try:
        yield
    finally:
        if borrowed:
            head.embed_tokens = None
