"""The house rules of packaging: what the wheel holds, what the root's folder names must not hide, who may import whom.

Slow parts (building the wheel, importing transformers in a fresh interpreter) run in subprocesses and without the network.
"""

import ast
import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "heads", "inference", "hub_export", "train")  # of the package, ground floor first
# Who may import whom; a folder may always import itself. cli.py calls into all of them.
ARROWS = {
    "kernels": set(),
    "heads": {"kernels"},
    "inference": {"heads", "kernels"},
    "hub_export": {"heads", "inference"},
    "train": {"heads", "kernels", "inference"},
}
# heads/export.py only makes `python -m heads.export` work from the checkout; nothing imports it.
STUB = "heads/export.py"
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEST_MODULES = sorted((ROOT / "tests").rglob("test_*.py"))


# What stands in for Hugging Face's `kernels`: any name can be imported, and whatever is built from it decorates nothing.
STAND_IN = """
class Anything:
    def __init__(self, *args, **kwargs):
        pass
    def __call__(self, decorated=None, *args, **kwargs):
        return decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {})
"""


def relative(path):
    return path.relative_to(ROOT).as_posix()


def run_python(code, cwd, *pythonpath):
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, (*map(str, pythonpath), *inherited)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from a copy of the checkout, without the network."""
    pytest.importorskip("build", reason="building the wheel needs the `dev` extra")
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    skipped = {"runs", "build", "dist", "wandb", "__pycache__", "assets"}  # assets: no part of the wheel, and large

    def left_out(folder, names):
        hidden = {name for name in names if name.startswith(".") or name.endswith(".egg-info")}
        environments = {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}
        return hidden | environments | skipped.intersection(names)

    shutil.copytree(ROOT, source, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("headstart-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_wheel_holds_every_module_and_configuration_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    expected = {f"headstart/{relative(path)}" for path in [*ROOT.glob("*.py"), *MODULES]}
    for pattern in ("configs/**/*.yaml", "configs/**/*.json"):
        expected |= {f"headstart/{relative(path)}" for path in ROOT.glob(pattern)}
    assert {"headstart/__init__.py", "headstart/cli.py", "headstart/heads/export.py"} <= held
    assert held == expected


def test_package_imports_from_the_wheel_alone(unpacked, tmp_path):
    code = (
        "import headstart\n"
        "print(headstart.__file__, *[getattr(headstart, name) and name for name in headstart.__all__])"
    )
    where, *names = run_python(code, tmp_path, unpacked)
    assert Path(where) == unpacked / "headstart" / "__init__.py"
    assert {"LLM", "SamplingParams", "load_head", "save_head"} <= set(names)


def test_console_scripts_lead_to_functions_of_the_wheel(unpacked, tmp_path):
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read(entry_points)
    scripts = dict(parser["console_scripts"])
    assert set(scripts) == {"headstart", "heads.export"}
    for target in scripts.values():
        module, function = target.split(":")
        code = f"import {module} as m; assert callable(m.{function}); print(m.__file__)"
        assert Path(*run_python(code, tmp_path, unpacked)).is_relative_to(unpacked)


def test_command_line_starts_without_torch(tmp_path):
    code = "import sys, headstart.cli as cli; cli.build_parser(); print('torch' in sys.modules)"
    assert run_python(code, tmp_path) == ["False"]


def test_export_runs_as_a_module_from_the_checkout():
    done = subprocess.run([sys.executable, "-m", "heads.export", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--format" in done.stdout


def test_only_the_root_holds_an_init():
    found = [
        relative(path)
        for folder in (*FOLDERS, "configs", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("__init__.py")
    ]
    assert found == []


def test_transformers_imports_from_the_root_and_finds_no_kernels_where_none_are_installed():
    found = importlib.util.find_spec("kernels")
    if found is not None and found.origin is not None:  # without an origin it is our own folder, seen from the root
        pytest.skip("Hugging Face's kernels are installed here")
    code = (
        "import kernels; from transformers import LlamaForCausalLM; from transformers.utils import is_kernels_available\n"
        "print(kernels.__file__, is_kernels_available())"
    )
    assert run_python(code, ROOT) == ["None", "False"]


def test_transformers_uses_the_installed_kernels_package_from_the_root(tmp_path):
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.12.0")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(STAND_IN)
    metadata = tmp_path / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    code = (
        "import kernels; from transformers import LlamaForCausalLM; import transformers.integrations.hub_kernels\n"
        "from transformers.utils import is_kernels_available; import headstart.heads.medusa\n"
        "print(kernels.__file__, is_kernels_available())"
    )
    assert run_python(code, ROOT, tmp_path) == [str(tmp_path / "kernels" / "__init__.py"), "True"]


def test_no_script_hides_a_package():
    """`accelerate launch train/medusa.py` puts train/ first on sys.path: a file there must not be called like a package."""
    names = {path.stem for path in (ROOT / "train").iterdir() if path.suffix == ".py" or path.is_dir()} - {
        "__pycache__"
    }
    wanted = {
        "accelerate",
        "datasets",
        "huggingface_hub",
        "jinja2",
        "kernels",
        "matplotlib",
        "numpy",
        "peft",
        "safetensors",
    }
    wanted |= {"tokenizers", "torch", "tqdm", "transformers", "triton", "wandb", "yaml", "headstart"}
    assert names & (wanted | set(sys.stdlib_module_names)) == set()
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "train")]
    hidden = [name for name in sorted(names) if PathFinder.find_spec(name, elsewhere) is not None]
    assert hidden == []


def imports_of(path):
    """(name as written, level of dots, full dotted name) of every import in a file, those inside functions included."""
    package = ("headstart", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            written = node.module or ""
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            for alias in node.names:
                yield written, node.level, ".".join(filter(None, (base, written, alias.name)))


@pytest.mark.parametrize("path", [path for path in MODULES if relative(path) != STUB], ids=relative)
def test_imports_follow_the_arrows(path):
    folder = path.relative_to(ROOT).parts[0]
    allowed = ARROWS[folder] | {folder}
    ours = [full.split(".")[1] for _, _, full in imports_of(path) if full.startswith("headstart.")]
    assert [name for name in ours if name in (*FOLDERS, "cli") and name not in allowed] == []
    # Without the prefix it would work from the checkout only, and `kernels` would be another package.
    assert [
        full for _, level, full in imports_of(path) if not level and full.split(".")[0] in (*FOLDERS[1:], "cli")
    ] == []


@pytest.mark.parametrize("path", [path for path in MODULES if relative(path) != STUB], ids=relative)
def test_library_files_import_relatively_and_scripts_absolutely(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    runs = any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)
    if runs and path.parent == ROOT / "train":
        assert [full for _, level, full in imports_of(path) if level] == []
    else:
        assert [full for _, level, full in imports_of(path) if not level and full.split(".")[0] == "headstart"] == []


def asserting_functions(tree, known=frozenset()):
    """Names of the functions that assert something themselves or call one that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    asserting, grown = set(known), True
    while grown:
        grown = False
        for function in functions:
            if function.name in asserting:
                continue
            calls = {
                getattr(node.func, "attr", getattr(node.func, "id", ""))
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
            }
            checks = calls & (asserting | {"raises"}) or any(call.startswith("assert_") for call in calls)
            if checks or any(isinstance(node, ast.Assert) for node in ast.walk(function)):
                asserting.add(function.name)
                grown = True
    return asserting


@pytest.mark.parametrize("path", TEST_MODULES, ids=relative)
def test_every_test_asserts(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert tests, "pytest would collect nothing from this file"
    assert sorted(tests - asserting_functions(tree)) == []
