"""Instruction pairs from Python source: a docstring is the request, the function without it is the answer.

`stdlib_pairs(split)` reads the running interpreter's own standard library, so every machine has training data without a
download. `package_pairs()` reads the installed packages whose metadata names a permissive licence. Both hold out whole
modules, chosen by a hash of the module's name (`is_heldout`), so every Python version and every machine splits alike.
Nothing is imported or executed: the source is parsed.

Not done here: chat formats, tokens (train/data/conversations.py), or mixing and training (assets/make/make_stdlib_coder.py).
"""

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

HELDOUT_PER_MILLE = 40  # about 20 modules and 400 functions of the standard library
SPLITS = ("train", "heldout")
MAX_FILE_BYTES = 600_000  # larger files are generated tables, and their few functions are not worth the parse
MIN_DOCSTRING, MAX_DOCSTRING = 20, 300
MIN_ANSWER, MAX_ANSWER, MAX_FURTHER_ANSWER = 40, 3000, 12_000

# Folders that hold demonstrations or other people's code under other licences.
_SKIPPED_FOLDERS = {
    "__pycache__", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo",
    "pydoc_data", "ensurepip", "_vendor", "_vendored_packages", "vendor", "vendored", "third_party", "extern",
    "externals", "_distutils_hack",
}  # fmt: skip


_TEST_FOLDERS = {"test", "tests"}


@dataclass(frozen=True)
class Pair:
    """One request and its answer. `documented`: a function of moderate length whose request quotes its docstring."""

    module: str
    name: str
    prompt: str
    answer: str
    documented: bool

    def conversation(self) -> list[dict]:
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


def is_heldout(module: str) -> bool:
    """Whether the module with this full dotted name ("json.decoder") is kept out of training, in every source.

    Decided by SHA-256 of the name, so it does not depend on the machine, the Python version or the order of files.
    """
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PER_MILLE


def body_key(answer: str) -> bytes:
    """Key of an answer without its whitespace: copies of a function share it, however they are indented."""
    return hashlib.sha256("".join(answer.split()).encode()).digest()[:16]


def pairs_from_source(source: str, module: str, further: bool = False) -> list[Pair]:
    """The pairs of one module's source text, in source order; empty if it does not parse.

    Answers are documented functions and methods of 40 to 3000 characters, dedented, without docstring and decorators.
    Functions inside functions stay part of the outer one. `further` adds more Python: functions without a docstring of
    at least 20 characters, longer functions, and classes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    # The parser counts lines by \n, \r\n and \r only; str.splitlines would also cut at form feeds.
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    pairs = []
    for owner, node in _definitions(tree, ""):
        docstring = " ".join((ast.get_docstring(node, clean=False) or "").split())
        described = len(docstring) >= MIN_DOCSTRING
        is_class = isinstance(node, ast.ClassDef)
        if not further and (is_class or not described):
            continue
        answer = _answer(node, lines, bool(docstring))
        if answer is None or not MIN_ANSWER <= len(answer) <= (MAX_FURTHER_ANSWER if further else MAX_ANSWER):
            continue
        if described:
            prompt = (
                f"Write the Python {'class' if is_class else 'function'} `{node.name}`: {docstring[:MAX_DOCSTRING]}"
            )
        elif is_class:
            prompt = f"Write the Python class `{node.name}`."
        elif owner:
            prompt = f"Write the Python method `{owner}.{node.name}`."
        else:
            prompt = f"Write the Python function `{node.name}`."
        documented = described and not is_class and len(answer) <= MAX_ANSWER
        pairs.append(Pair(module, node.name, prompt, answer, documented))
    return pairs


def stdlib_pairs(split: str) -> list[Pair]:
    """Pairs of the running interpreter's standard library, in a fixed order, each body once.

    split: "train" or "heldout". Held-out bodies never appear in "train", even if a module copies another's.
    Raises ValueError for another split, and if this Python was installed without its source files.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} of the stdlib set does not exist; choose one of {', '.join(SPLITS)}")
    train, heldout = split_pairs(stdlib_source_pairs())
    return train if split == "train" else heldout


def installed_pairs(split: str) -> list[Pair]:
    """`stdlib_pairs` and the pairs of installed packages under permissive licences: more pairs, different on every machine."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} of the installed set does not exist; choose one of {', '.join(SPLITS)}")
    train, heldout = split_pairs(stdlib_source_pairs() + package_pairs()[0])
    return train if split == "train" else heldout


def stdlib_source_pairs(further: bool = False) -> list[Pair]:
    """All pairs of the standard library, not yet split or deduplicated. Raises ValueError if there are none."""
    pairs = list(_module_pairs(stdlib_modules(), further))
    if not pairs:
        raise ValueError(
            f"no Python source found under {sysconfig.get_paths()['stdlib']}: this interpreter comes without the "
            "source of its standard library; use one that has it, or give a JSONL file as the data"
        )
    return pairs


def split_pairs(pairs) -> tuple[list[Pair], list[Pair]]:
    """(train, held-out) of pairs by `is_heldout`, each body once.

    No training pair repeats a held-out pair: neither the same body under another module's name, nor an edited copy. A
    function is an edited copy if more than 60 % of its lines are lines of held-out functions.
    """
    heldout, train = {}, {}
    remaining = []
    for pair in pairs:
        key = body_key(pair.answer)
        if is_heldout(pair.module):
            heldout.setdefault(key, pair)
        else:
            remaining.append((key, pair))
    known = {line for pair in heldout.values() for line in _telling_lines(pair.answer)}
    for key, pair in remaining:
        # Among copies, keep the pair whose request quotes a docstring.
        if key in heldout or (key in train and not (pair.documented and not train[key].documented)):
            continue
        lines = _telling_lines(pair.answer)
        if len(lines) < 3 or sum(line in known for line in lines) <= 0.6 * len(lines):
            train[key] = pair
    return list(train.values()), list(heldout.values())


def _telling_lines(answer: str) -> list[str]:
    """Lines long enough that two functions rarely share them by chance."""
    return [line for line in map(str.strip, answer.split("\n")) if len(line) >= 16]


def stdlib_modules() -> list[tuple[str, Path]]:
    """(dotted name, path) of every module of the standard library that pairs are taken from, sorted by name."""
    return sorted(_walk_modules(Path(sysconfig.get_paths()["stdlib"]), ""))


@dataclass(frozen=True)
class Source:
    """A distribution that pairs were taken from."""

    package: str
    version: str
    licence: str


def package_pairs(further: bool = False, workers: int | None = None) -> tuple[list[Pair], list[Source]]:
    """Pairs of all installed packages whose metadata names a permissive licence, and the list of these packages.

    Order: by package, then module. A package is skipped whole if its licence is not permissive, unclear or missing; folders
    of vendored code are skipped too. Bodies are not deduplicated here: pass the result through `split_pairs`.
    workers: parsing processes (None: one per CPU).
    """
    sources, modules = [], []
    distributions = {str(d.metadata["Name"]).lower(): d for d in metadata.distributions() if d.metadata["Name"]}
    for name, distribution in sorted(distributions.items()):
        licence = permissive_licence(distribution.metadata)
        if licence is None or name == "headstart":
            continue
        found = sorted(_distribution_modules(distribution, tests=further))
        if found:
            sources.append(Source(name, distribution.version, licence))
            modules.extend(found)
    # Spawned workers: a forked copy of a process that already runs threads (tokenizers, CUDA) can hang.
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        return list(_module_pairs(modules, further)), sources
    chunks = [modules[i : i + 128] for i in range(0, len(modules), 128)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = pool.map(_list_module_pairs, chunks, [further] * len(chunks))
        return [pair for chunk in results for pair in chunk], sources


# SPDX identifiers, and what classifiers and short licence fields say, in lower case.
_PERMISSIVE_SPDX = {
    "mit", "mit-0", "mit-cmu", "mitnfa", "bsd", "bsd-1-clause", "bsd-2-clause", "bsd-3-clause", "0bsd", "apache-2.0", "isc",
    "psf-2.0", "python-2.0", "python-2.0.1", "zlib", "unlicense", "cc0-1.0", "hpnd", "bsl-1.0", "ncsa", "blueoak-1.0.0",
    "zpl-2.1", "llvm-exception",
}  # fmt: skip
_PERMISSIVE_CLASSIFIERS = {
    "MIT License", "MIT No Attribution License (MIT-0)", "BSD License", "Apache Software License", "ISC License (ISCL)",
    "Python Software Foundation License", "zlib/libpng License", "The Unlicense (Unlicense)",
    "Historical Permission Notice and Disclaimer (HPND)", "Boost Software License 1.0 (BSL-1.0)",
    "University of Illinois/NCSA Open Source License", "Zope Public License",
}  # fmt: skip
_PERMISSIVE_TEXT = re.compile(
    r"(the )?(new |modified |simplified )?(mit|isc|zlib|psf|python software foundation|unlicense|(3|2)-clause bsd|"
    r"bsd([- ](2|3)([- ]clause)?)?|apache( software)?( license)?[, -]*(version )?2(\.0)?)( license)?",
)
_COPYLEFT = re.compile(r"gpl|mpl|mozilla|epl|eupl|cddl|proprietary|commercial|non-?commercial|osl", re.IGNORECASE)


def permissive_licence(fields) -> str | None:
    """The permissive licence that a distribution's metadata names; None if it is another, mixed or unknown.

    fields: a message of core metadata (`importlib.metadata`). In a combined SPDX expression every licence must be
    permissive, even those joined by OR: that skips little, and whatever is taken is certainly permissive.
    """
    expression = (fields.get("License-Expression") or "").strip()
    if expression:
        names = re.findall(r"[\w.+-]+", re.sub(r"\b(AND|OR|WITH)\b", " ", expression))
        return expression if names and all(name.lower() in _PERMISSIVE_SPDX for name in names) else None
    text = (fields.get("License") or "").strip()
    short = text if len(text) < 100 and "\n" not in text else ""
    if _COPYLEFT.search(short):
        return None
    classifiers = [line for line in fields.get_all("Classifier") or [] if line.startswith("License ::")]
    named = {line.split(" :: ")[-1] for line in classifiers} - {"OSI Approved"}
    if named:
        return ", ".join(sorted(named)) if named <= _PERMISSIVE_CLASSIFIERS else None
    if short.lower() in _PERMISSIVE_SPDX or _PERMISSIVE_TEXT.fullmatch(short.lower()):
        return short
    return None


def _definitions(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.AST]]:
    """Classes and functions of a module in source order, with the class they belong to; none inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, child
        elif isinstance(child, ast.ClassDef):
            yield owner, child
            yield from _definitions(child, child.name)
        elif isinstance(child, ast.stmt | ast.ExceptHandler):  # if TYPE_CHECKING, try/except ImportError ...
            yield from _definitions(child, owner)


def _answer(node, lines: list[str], has_docstring: bool) -> str | None:
    """The definition's dedented text without its docstring; None if nothing is left or the cut is not at line ends."""
    text = lines[node.lineno - 1 : node.end_lineno]
    if lines[node.lineno - 1][: node.col_offset].strip():
        return None  # other code stands before it on its line
    if has_docstring:
        docstring, *rest = node.body
        if not rest or docstring.lineno == node.lineno or rest[0].lineno <= docstring.end_lineno:
            return None
        text = text[: docstring.lineno - node.lineno] + text[docstring.end_lineno - node.lineno + 1 :]
    indent = node.col_offset
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in text).rstrip()


def _walk_modules(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for entry in os.scandir(folder):
        stem, extension = os.path.splitext(entry.name)
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED_FOLDERS | _TEST_FOLDERS and entry.name.isidentifier():
                yield from _walk_modules(Path(entry.path), f"{prefix}{entry.name}.")
        elif extension == ".py" and stem.isidentifier():
            yield (prefix[:-1] if stem == "__init__" and prefix else prefix + stem), Path(entry.path)


def _distribution_modules(distribution, tests: bool) -> Iterator[tuple[str, Path]]:
    for file in distribution.files or []:
        *folders, last = file.parts
        stem, extension = os.path.splitext(last)
        if extension != ".py" or _SKIPPED_FOLDERS & set(folders) or (not tests and _TEST_FOLDERS & set(folders)):
            continue
        parts = folders if stem == "__init__" else [*folders, stem]
        if parts and all(part.isidentifier() for part in parts):
            yield ".".join(parts), Path(str(file.locate()))


def _module_pairs(modules: list[tuple[str, Path]], further: bool) -> Iterator[Pair]:
    for module, path in modules:
        in_tests = _TEST_FOLDERS & set(module.split("."))
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                continue
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a listed file is missing or in another encoding: rare, and not our error
        for pair in pairs_from_source(source, module, further):
            yield replace(pair, documented=False) if in_tests else pair


def _list_module_pairs(modules: list[tuple[str, Path]], further: bool) -> list[Pair]:
    return list(_module_pairs(modules, further))
