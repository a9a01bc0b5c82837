"""Pairs from Python source: what is cut out, what is held out, and which licences count as permissive."""

import ast
import importlib.metadata
import textwrap
from email.message import Message

import pytest

from headstart.train.data import stdlib_pairs as source

DOC = "Return the sum of both numbers, always."


def pairs_of(text, **kwargs):
    return source.pairs_from_source(textwrap.dedent(text), "some.module", **kwargs)


def test_function_loses_its_docstring_and_indentation():
    (pair,) = pairs_of(f'''
        class Adder:
            @staticmethod
            def add(left, right):
                """{DOC}

                More about it.
                """
                # carefully
                return left + right
    ''')
    assert pair.prompt == f"Write the Python function `add`: {DOC} More about it."
    assert pair.answer == "def add(left, right):\n    # carefully\n    return left + right"
    assert pair.conversation()[1] == {"role": "assistant", "content": pair.answer}


def test_long_docstring_is_quoted_up_to_300_characters():
    (pair,) = pairs_of(f'def long(first, second):\n    """{"word " * 100}"""\n    return first * second + 1\n')
    assert pair.prompt == "Write the Python function `long`: " + ("word " * 100)[:300]


@pytest.mark.parametrize(
    "text",
    [
        f'def only(a): "{DOC}"',
        f'def only(a):\n    """{DOC}"""',
        f'def joined(a, b):\n    """{DOC}"""; return a + b + 1000000000000000',
        'def short(a, b):\n    """Too short."""\n    return a + b + 1000000000000000',
        f'def tiny():\n    """{DOC}"""\n    return 1',
        f'def broken(a, b:\n    """{DOC}"""\n    return a + b',
        f'def nul():\n    """{DOC}"""\n    return "\0" + "not valid source"',
    ],
)
def test_what_makes_no_good_pair_is_left_out(text):
    assert source.pairs_from_source(text, "m") == []


def test_lines_are_counted_as_the_parser_counts_them():
    body = f'def after(left, right):\n    """{DOC}"""\n    return left + right + 12345\n'
    expected = "def after(left, right):\n    return left + right + 12345"
    for text in ("x = 1\n\x0c\n" + body, ("x = 1\n" + body).replace("\n", "\r\n"), 'y = "\u2028"\n' + body):
        assert [pair.answer for pair in source.pairs_from_source(text, "m")] == [expected]


def test_inner_functions_stay_with_the_outer_one_and_guarded_ones_are_found():
    pairs = pairs_of(f'''
        try:
            import fast
        except ImportError:
            async def outer(left, right):
                """{DOC}"""
                def inner(value):
                    """{DOC} Inner."""
                    return value + 1234567890
                return inner(left) + inner(right)
    ''')
    assert [pair.name for pair in pairs] == ["outer"]
    assert "Inner." in pairs[0].answer
    assert pairs[0].answer.startswith("async def outer(")


def test_further_pairs_are_asked_for_by_name_and_are_not_documented():
    text = f'''
        class Box:
            """A box that holds a single value."""

            def set_value(self, value):
                self.value = value + self.offset

            def get_value(self, value):
                """{DOC}"""
                return self.value + self.offset

        def plain(left, right):
            return left * right + left - right
    '''
    assert [pair.name for pair in pairs_of(text)] == ["get_value"]
    prompts = {pair.prompt: pair.documented for pair in pairs_of(text, further=True)}
    assert prompts == {
        "Write the Python class `Box`: A box that holds a single value.": False,
        "Write the Python method `Box.set_value`.": False,
        f"Write the Python function `get_value`: {DOC}": True,
        "Write the Python function `plain`.": False,
    }


def test_split_depends_on_the_modules_name_alone():
    # Fixed for good: a change here lets functions of the shipped heldout.jsonl into the training side.
    heldout = {"threading", "pprint", "unittest.mock", "concurrent.futures._base", "xml.dom.pulldom"}
    train = {"json", "json.encoder", "argparse", "asyncio.events", "textwrap"}
    assert all(map(source.is_heldout, heldout))
    assert not any(map(source.is_heldout, train))
    share = sum(source.is_heldout(f"package{i}.module") for i in range(20_000)) / 20_000
    assert 0.035 < share < 0.045


def test_standard_library_gives_thousands_of_valid_functions(stdlib_splits):
    splits = stdlib_splits
    assert len(splits["train"]) > 4000
    assert len(splits["heldout"]) >= 200
    for pair in splits["train"] + splits["heldout"]:
        (function,) = ast.parse(pair.answer).body
        assert function.name == pair.name
        assert ast.get_docstring(function) is None or pair.answer.count('"""') >= 4  # two strings in a row
        assert pair.documented
        assert 40 <= len(pair.answer) <= 3000


def test_no_heldout_module_or_body_is_in_the_training_split(stdlib_splits):
    splits = stdlib_splits
    assert all(source.is_heldout(pair.module) for pair in splits["heldout"])
    assert not any(source.is_heldout(pair.module) for pair in splits["train"])
    bodies = [source.body_key(pair.answer) for split in source.SPLITS for pair in splits[split]]
    assert len(set(bodies)) == len(bodies)


def test_standard_library_comes_in_the_same_order_every_time(monkeypatch):
    modules = source.stdlib_modules()[::8]  # all take seconds
    monkeypatch.setattr(source, "stdlib_modules", lambda: modules)
    pairs = source.stdlib_pairs("train")
    assert len(pairs) > 50
    assert source.stdlib_pairs("train") == pairs


def test_copies_of_heldout_functions_are_dropped_and_documented_copies_preferred():
    held = source.Pair(
        "threading", "f", "p", "def f(self, name):\n    self.name = name\n    return self.name + name\n", True
    )
    edited = held.answer.replace("def f(self, name)", "def another(self, name)")
    own = "def own(value):\n    first = value * 2\n    second = first + value\n    return first * second"
    pairs = [
        source.Pair("textwrap", "f", "p", held.answer.replace("    ", "\t"), True),  # other whitespace
        source.Pair("textwrap", "another", "p", edited, True),
        source.Pair("textwrap", "own", "by name", own, False),
        source.Pair("argparse", "own", "documented", own, True),
        held,
    ]
    train, heldout = source.split_pairs(pairs)
    assert heldout == [held]
    assert [pair.prompt for pair in train] == ["documented"]


def test_unknown_split_and_missing_source_are_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"split 'test'.*train, heldout"):
        source.stdlib_pairs("test")
    monkeypatch.setattr(source.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="no Python source found under"):
        source.stdlib_pairs("train")


def fields(**values):
    message = Message()
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            message[name.replace("_", "-")] = item
    return message


MIT = "License :: OSI Approved :: MIT License"
GPL = "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        (fields(License_Expression="MIT"), "MIT"),
        (fields(License_Expression="BSD-3-Clause AND (MIT OR Apache-2.0)"), "BSD-3-Clause AND (MIT OR Apache-2.0)"),
        (fields(License_Expression="MPL-2.0 AND MIT"), None),
        (fields(License_Expression="MIT OR GPL-2.0-only"), None),
        (fields(License_Expression="LicenseRef-Proprietary"), None),
        (fields(Classifier=[MIT, "Topic :: Software Development"]), "MIT License"),
        (fields(Classifier=[MIT, GPL]), None),
        (fields(Classifier=["License :: OSI Approved"]), None),
        (fields(Classifier=[MIT], License="GPLv3"), None),
        (fields(License="Apache License, Version 2.0"), "Apache License, Version 2.0"),
        (fields(License="BSD 3-Clause"), "BSD 3-Clause"),
        (fields(License="MIT with a special clause"), None),
        (fields(License="Copyright (c) somebody\nPermission is hereby granted"), None),
        (fields(Name="silent"), None),
    ],
)
def test_only_certainly_permissive_licences_pass(metadata, licence):
    assert source.permissive_licence(metadata) == licence


def test_packages_without_a_permissive_licence_and_vendored_folders_are_skipped(monkeypatch, tmp_path):
    function = 'def {name}(left, right):\n    """' + DOC + '"""\n    return left + right + 12345\n'
    for package, licence in (("freely", "MIT"), ("copyleft", "GPL-3.0-only")):
        files = {
            f"{package}/{package}_code.py": "one",
            f"{package}/_vendor/other.py": "two",
            f"{package}/tests/t.py": "three",
        }
        for path, name in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(function.format(name=f"{package}_{name}"))
        info = tmp_path / f"{package}-1.5.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {package}\nVersion: 1.5\nLicense-Expression: {licence}\n"
        )
        info.joinpath("RECORD").write_text("".join(f"{path},,\n" for path in files))
    distributions = list(importlib.metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(source.metadata, "distributions", lambda: distributions)
    pairs, sources = source.package_pairs(workers=1)
    assert [pair.name for pair in pairs] == ["freely_one"]
    assert sources == [source.Source("freely", "1.5", "MIT")]
    further, _ = source.package_pairs(further=True, workers=2)
    assert {pair.name: pair.documented for pair in further} == {"freely_one": True, "freely_three": False}
