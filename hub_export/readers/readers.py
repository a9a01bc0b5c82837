"""Decide which engines read a head's files: for the model card of an export, and for `headstart inspect` of any files.

The requirements of a family's readers are in hub_export/readers/<key>.py, from their source code, 2026-11. A rule takes HeadFiles
and yields problems: pairs of a kind (below) and a sentence in which "it" is the reader. Every module of a family has:

    READERS          its Readers, in the order in which they are listed
    FORMATS_ARE      how its formats differ: DIALECTS, ALIKE or APART
    FROM_LM_HEAD     whether the head's own output matrices may have been started from the target's lm_head
    in_card          (head) -> its name in a card, the verb of its drafting, and (name, value) of its hyperparameters
    title            (config of `headstart inspect` as a dict) -> the head in one line
    features         (head, the target's number of layers or None) -> what it reads of the target, for `headstart inspect`
    tables           (head) -> sources of its lm_head and of its embedding of drafted tokens, in words; None: it has none

This file derives a verdict from the rules, finds the format that mends a problem, and writes the command that starts each engine.
Reads no disk.
"""

import json
import shlex
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch
from torch import nn

from ...heads.families import SAFETENSORS_FILE, TORCH_FILE, check_format, family_of, to_file
from ...heads.formats.layer import DEFAULT_THETA
from ...heads.storage.hub_id import split_revision

VLLM, TGI, SGLANG = "vLLM", "text-generation-inference", "SGLang"
# Kinds of problems. LAYOUT: the reader expects another format; NO: it cannot load the files, or serves without drafting; WRONG: it
# loads them, but computes something else than the head; NOTE: it loads them, with a remark.
LAYOUT, NO, WRONG, NOTE = "layout", "no", "wrong", "note"
# How the formats of a family differ. DIALECTS: in a key and a tensor, which the rules check. ALIKE: so little that a reader's own
# format can be judged too. APART: too much for that; only the format is named.
DIALECTS, ALIKE, APART = "dialects", "alike", "apart"
SGLANG_TOP, SGLANG_TOKENS = 4, 16  # children of a node, and tokens of a step at most


@dataclass(frozen=True)
class HeadFiles:
    """A head's files as a reader sees them (`config`, `tensors`, `files`, `path`), and the head that they hold."""

    head: nn.Module
    format: str  # the layout, one of FORMATS
    config: dict  # config.json
    tensors: frozenset  # names in the weight files, without `prefix`
    files: frozenset  # names in the folder
    path: str | None = None  # the path given to a reader; None: not known yet
    num_layers: int | None = None  # of the target; None: not known
    prefix: str = ""  # an unexpected prefix of all tensor names


@dataclass(frozen=True)
class Reader:
    """A project that reads heads of a family."""

    name: str
    formats: dict = field(
        default_factory=dict
    )  # its own, the first the best -> what the card says where nothing is wrong
    rule: Callable | None = None  # HeadFiles -> problems
    others: dict = field(default_factory=dict)  # format -> another rule
    starts: str = ""  # for its command: versions of vLLM, or SGLang's name of the algorithm; "": there is no command
    without: str = ""  # the card's text for a reader without formats


@dataclass(frozen=True)
class Asks:
    """A reader's requirement on a key of config.json, and what happens if it is not met.

    text: with {said} (the value in config.json), {expected} and {key}; value: the expected value, or of: the field of the head's
    config that holds it; default: the meaning of an absent key.
    """

    key: str
    text: str
    kind: str = NO
    value: object = None
    of: str | None = None
    default: object = None


def asked(files, table):
    """The problems with a reader's requirements (a table of Asks)."""
    for one in table:
        said = files.config.get(one.key, one.default)
        expected = getattr(files.head.config, one.of) if one.of else one.value
        if said != expected:
            yield one.kind, one.text.format(key=one.key, said=said, expected=expected)


BUILDS = "it builds {key} {said} by config.json, the tensors have {expected}"
NO_BIASES = "it has no biases of q, k and v, and passes over those in the file"


def names_target(files):
    if not files.config.get("base_model_name_or_path"):
        yield NO, "config.json names no target (`base_model_name_or_path`), which it loads by it"


def layer_said(files):
    """Problems with a reader that would build a decoder layer of wrong sizes, or more than one layer."""
    config, head = files.config, files.head.config
    heads, hidden_size = config.get("num_attention_heads") or 32, config.get("hidden_size") or 4096
    guessed = {"num_key_value_heads": heads}
    if type(heads) is int and type(hidden_size) is int:
        guessed["head_dim"] = hidden_size // heads
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    found = {name: getattr(head, name) for name in names} | {"num_hidden_layers": 1}
    for name, value in found.items():
        said = config.get(name) or guessed.get(name)
        if said != value:
            says = "nothing" if said is None else said
            yield NO, f"it builds the layer by config.json, which says {says} of {name}; the tensors say {value}"


def rope_said(files):
    """Problems with a config that has rope only in the new spelling, or not at all."""
    config, head = files.config, files.head.config
    plain = head.rope_theta == DEFAULT_THETA and head.rope_scaling is None
    if "rope_theta" not in config and "rope_parameters" in config and not plain:
        yield WRONG, "on transformers 4 it sees `rope_theta` and `rope_scaling` only: it takes 10000 without scaling"
    elif "rope_theta" not in config and "rope_parameters" not in config:
        yield NOTE, "config.json says no `rope_theta`: it takes its default, mostly 10000"


def layer_tables(head):
    """The member `tables` for families with a decoder layer: sources of lm_head and embedding, in words."""
    lm_head = "the target's" if head.uses_target_lm_head else "own"
    if head.needs_embedding:
        return lm_head, "the target's, not in the file"
    return lm_head, "own" if head.embed_tokens.weight.requires_grad else "the target's, a copy in the file"


@dataclass(frozen=True)
class Verdict:
    """Whether a reader takes some files, and its problems with them.

    loads: whether it loads them and drafts; problems: of its rule, without notes; how: the card's text if there are none; mend: the
    export format that mends the problems, or None; stays: the problems that remain in that format.
    """

    reader: str
    loads: bool
    problems: tuple = ()
    notes: tuple = ()
    how: str = "yes"
    mend: str | None = None
    stays: tuple = ()


def rules_of(family):
    """The module of a Family's readers."""
    return import_module(f".{family.key}", __package__)


def readers_table(head, format):
    """Rows of (reader, verdict in words) for an export of this head in this format."""
    written = files_as_written(head, format)
    word = "dialect" if rules_of(family_of(head)).FORMATS_ARE == DIALECTS else "layout"
    return [("Headstart", "yes"), *((verdict.reader, _in_words(verdict, word)) for verdict in judge(written))]


def _in_words(verdict, word):
    kinds, sentences = [kind for kind, _ in verdict.problems], "; ".join(text for _, text in verdict.problems)
    if verdict.loads:
        return f"{verdict.how}, but {sentences}" if sentences else verdict.how
    if LAYOUT in kinds and verdict.mend:
        return f"not this {word}: export with `--format {verdict.mend}`"
    return f"no: {sentences}" if kinds else verdict.how


def judge(files):
    """The Verdict of every reader of the family on HeadFiles."""
    rules = rules_of(family_of(files.head))
    # The files of every format that some reader takes and that can hold this head.
    exports = {
        format: _naming_a_target(files_as_written(files.head, format, files.num_layers))
        for format in dict.fromkeys(format for reader in rules.READERS for format in reader.formats)
        if _can_be_written(files.head, format)
    }
    return [_verdict(reader, files, exports, rules.FORMATS_ARE) for reader in rules.READERS]


def _verdict(reader, files, exports, formats_are):
    if not reader.formats:
        return Verdict(reader.name, False, how=reader.without)
    found = _problems(reader, files, formats_are)
    written = {
        format: _problems(reader, exports[format], formats_are) for format in reader.formats if format in exports
    }
    best = min(written, key=lambda format: _badness(written[format]), default=None)
    helps = best is not None and not _badness(written[best])[0] and _badness(written[best]) < _badness(found)
    mend = best if helps else None
    problems = [problem for problem in found if problem[0] != NOTE]
    if any(kind == LAYOUT for kind, _ in found):
        # Problems with the head itself count in every layout.
        inherent = [problem for problem in written.get(best, ()) if problem[0] in (NO, WRONG)]
        problems += [problem for problem in inherent if problem not in problems]
        if mend is None and any(kind == NO for kind, _ in problems):
            problems = [problem for problem in problems if problem[0] == NO]
    notes = tuple(text for kind, text in found if kind == NOTE)
    loads = not any(kind in (LAYOUT, NO) for kind, _ in found)
    stays = tuple(problem for problem in written[mend] if problem[0] != NOTE) if mend else ()
    return Verdict(
        reader.name,
        loads,
        problems=tuple(problems),
        notes=notes,
        how=reader.formats.get(files.format, "yes"),
        mend=mend,
        stays=stays,
    )


def _problems(reader, files, formats_are):
    """All problems of one reader with some files, notes included."""
    rule = reader.others.get(files.format, reader.rule)
    found = [(LAYOUT, f"it knows no tensors whose names begin with {files.prefix!r}")] if files.prefix else []
    if files.format in reader.formats or formats_are == DIALECTS:
        return found + list(rule(files))
    found.append((LAYOUT, f"it reads the format {' or '.join(reader.formats)}"))
    return found + ([problem for problem in rule(files) if problem[0] == NO] if formats_are == ALIKE else [])


def _naming_a_target(files):
    """The files as an export with --base-model writes them, if the head names no target."""
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
    """HeadFiles of an export of `head`, without writing it; ValueError if `format` cannot hold it."""
    with _embedding_of(head, format):
        config = head.config
        dtype = next(head.parameters()).dtype
        # Its values are never read, so its memory is never touched.
        copied = format == "vllm" or (format == "speculators" and head.uses_target_lm_head)
        lm_head = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype) if copied else None
        tensors, said = to_file(head, format, lm_head)
    names = {"config.json", SAFETENSORS_FILE[format], TORCH_FILE.get(format, "config.json")}
    return HeadFiles(head, format, said, frozenset(tensors), frozenset(names), num_layers=num_layers)


@contextmanager
def _embedding_of(head, format):
    """Embedding for "speculators", which stores the target's if the head has none; zeros stand for it here."""
    borrowed = format == "speculators" and head.needs_embedding
    if borrowed:
        head.take_embedding(torch.zeros(head.config.vocab_size, head.config.hidden_size))
        head.embedding_is_targets = False
    try:
        yield
    finally:
        if borrowed:
            head.embed_tokens = None


def split_name(name):
    """(repository, branch or None) of an export's name. A folder's name has no branch, even if it holds an @."""
    return split_revision(name) if "/" in name else (name, None)


def engine_commands(head, format, name, target):
    """Commands that start vLLM, SGLang and text-generation-inference with an export: a text for each engine without problems.

    Arguments as for `usage` of hub_export/model_card.py; commands from the projects' own documents and source, 2026-11.
    """
    of_merged = ""
    if head.adapter:
        of_merged = f", where TARGET is `{target}` with the adapter merged (`heads.export --merge-adapter`)"
        target = "TARGET"
    family = family_of(head)
    clean = {one.reader for one in judge(files_as_written(head, format)) if one.loads and not one.problems}
    takers = {reader.name: reader for reader in rules_of(family).READERS if reader.name in clean}
    (repo_id, branch), depth = split_name(name), head.num_speculative_tokens
    parts = []
    if VLLM in takers and takers[VLLM].starts:
        config = {"method": family.key, "model": repo_id, "num_speculative_tokens": depth}
        config |= {"revision": branch} if branch else {}
        parts.append(f"""In {takers[VLLM].starts}{of_merged}:

```sh
vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}
```""")
    if SGLANG in takers and takers[SGLANG].starts:
        of_branch = f" --speculative-draft-model-revision {shlex.quote(branch)}" if branch else ""
        most = 1 + SGLANG_TOP + (depth - 1) * SGLANG_TOP**2  # nodes of such a tree, the root included
        parts.append(f"""In SGLang (steps, width and tokens of its tree are a start, not a measurement):

```sh
python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {takers[SGLANG].starts} \\
    --speculative-draft-model-path {shlex.quote(repo_id)}{of_branch} --speculative-num-steps {depth} \\
    --speculative-eagle-topk {SGLANG_TOP} --speculative-num-draft-tokens {min(SGLANG_TOKENS, most)}
```""")
    if TGI in takers:
        of_branch = f" --revision {shlex.quote(branch)}" if branch else ""
        # It serves the target that config.json names.
        named = f"it serves `{target}`"
        if of_merged:
            named = f"config.json must name TARGET as base_model_name_or_path{of_merged}"
        parts.append(
            f"""In text-generation-inference, which takes these files as the model and finds the target by config.json ({named}):

```sh
text-generation-launcher --model-id {shlex.quote(repo_id)}{of_branch} --speculate {depth}
```"""
        )
    return parts
