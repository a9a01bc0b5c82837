"""Rules of packaging: content of the wheel, names that the root's folders must not hide, allowed imports.

Slow parts (building the wheel, importing transformers in a fresh interpreter) run in subprocesses and without the network.
"""

import ast
import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "heads", "inference", "evaluation", "train", "hub_export", "benchmarks", "commands")
# The floors of the house, the ground floor first: a file imports from floors below its own, or from its own floor where that makes
# no cycle of files; rooms that stand side by side are not told of each other. A room is a folder: the longest name here decides.
FLOORS = (
    ("kernels",),
    ("heads",),
    ("inference/models", "inference/speculation", "inference/grammar"),
    ("inference/engine",),
    ("inference",),
    ("evaluation",),
    ("train", "hub_export"),
    ("benchmarks",),
    ("commands",),
)
STRANGERS = ({"train", "hub_export"},)  # on one floor, and neither imports the other
# Public modules of each room; all others are private to it. Every op of kernels/ is public, and benchmarks/ may import from every
# room, because it measures private parts.
PUBLIC = {
    "heads": "block block_config checkpoint draft_vocabulary eagle eagle3 families head layers medusa mlp_speculator "
    "packed_attention",
    "heads/formats": "block eagle eagle3 layer medusa mlp_speculator",
    "heads/storage": "atomic_write hub_answer hub_id keywords reading remote_code tensor_checks user_errors weight_files",
    "inference/models": "adapter architectures blocks canary checkpoint_files decoder divided_weight division layer_reach memory "
    "support target_source transport weights",
    "inference/models/modules": "divided_products module_decoder module_source module_trial norm_modules",
    "inference/speculation": "draft draft_sampling draw_nodes options proposers speculation tree tree_on_device verifiers",
    "inference/speculation/drafters": "draft_model drafter lm_heads ngram",
    "inference/grammar": "grammars library matcher structured_outputs",
    "inference/engine": "engine logprobs metrics options request stopping target_scores",
    "inference": "arguments checked_prompt frozen_heap line llm metrics open_batch outputs prompt_files sampling_params session "
    "threads vllm_api",
    "inference/ranks": "tensor_parallel",
    "inference/server": "errors guard options serve",
    "inference/server/door": "access_log connections page unix_socket",
    "inference/server/driver": "engine_client engine_process job",
    "inference/server/tools": "call_styles tool_fields",
    "evaluation": "acceptance acceptance_lines charts compare lossless tree_choice tree_measurement tree_text",
    "train": "regenerate",
    "train/data": "chat_endpoint conversations dialogue encoding engine_answers generated_text held_out "
    "part_files regenerate_options rows stdlib_pairs survey template_date",
    "train/data/packed": "blend documents draft_vocabulary layout packing parts pieces row_reader slices store texts workers",
    "train/data/sources": "data_sets records",
    "train/estimate": "dry_run memory",
    "train/loss": "blocks distillation joint losses",
    "train/report": "dashboard page report workspace",
    "train/run": "acceptance checkpointing loop optimization recipe run_folder run_recipe settled_recipe start_head stopping "
    "tracking wandb_login",
    "train/run/saving": "best_head saver",
    "train/teacher": "divided_engine feature_cache features sharded_target target_adapter",
    "hub_export": "inspect_head",
    "hub_export/readers": "readers",
    "benchmarks": "measurement shape",
    "benchmarks/engine": "draft engine peer ranks step traffic",
    "benchmarks/ops": "kernel kernel_bench",
    "benchmarks/serving": "serve server_process",
    "benchmarks/training": "train",
    "commands": "config_file serve",
    "commands/bench": "speculation",
}
# Files of kernels/ without a test of their name: none of them is an operation.
WITHOUT_TEST = {
    "kernels/jit.py": "Triton where it is installed",
    "kernels/sampling/lowest_key.py": "device functions of keep_top, tested there",
    "kernels/speculation/ratio_rules.py": "the reference of verify_ratio: tests/inference/speculation/test_ratio_rules_exact.py",
}
MOST_FILES, MOST_LINES = 16, 400  # of a room, of a file
# heads/export.py only makes `python -m heads.export` work from the checkout; nothing imports it.
STUB = "heads/export.py"
# Folders of scripts: each stands first on sys.path while one of its scripts runs.
SCRIPT_FOLDERS = ("train", "benchmarks/headline", "benchmarks/training", "benchmarks/proofs", "assets/make")
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
    for pattern in ("configs/**/*.yaml", "configs/**/*.json", "inference/server/door/*.html"):
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
    named = [target.split(":") for target in scripts.values()]
    code = "\n".join(
        f"import {module} as m; assert callable(m.{function}); print(m.__file__)" for module, function in named
    )
    found = run_python(code, tmp_path, unpacked)
    assert len(found) == 2
    assert all(Path(path).is_relative_to(unpacked) for path in found)


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
        for folder in (*FOLDERS, "configs", "tests", "assets")
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


@pytest.mark.parametrize("folder", SCRIPT_FOLDERS)
def test_no_script_hides_a_package(folder):
    """`accelerate launch train/medusa.py` puts train/ first on sys.path: nothing there may have the name of a package."""
    names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"}
    wanted = {"accelerate", "datasets", "huggingface_hub", "jinja2", "kernels", "matplotlib", "numpy", "peft"}
    wanted |= {"safetensors", "tokenizers", "torch", "tqdm", "transformers", "triton", "wandb", "yaml", "headstart"}
    assert names & (wanted | set(sys.stdlib_module_names)) == set()
    ours = (ROOT, *(ROOT / folder for folder in SCRIPT_FOLDERS))
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() not in ours]
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


def room_of(name):
    """The folder of a file, as a path from the root: heads/storage."""
    return str(Path(name).parent)


def floor_of(name):
    """The floor of a file: 0 is the ground; cli.py stands on top."""
    rooms = {room: floor for floor, on_floor in enumerate(FLOORS) for room in on_floor}
    inside = [room for room in rooms if f"{room_of(name)}/".startswith(f"{room}/")]
    return rooms[max(inside, key=len)] if inside else len(FLOORS)


@pytest.fixture(scope="module")
def graph():
    """{file: files of ours that it imports}, lazy imports and those of scripts included."""
    files = {relative(path) for path in MODULES} | {"cli.py", "__init__.py"}

    def file_of(full):
        parts = full.split(".")[1:]
        while parts and "/".join(parts) + ".py" not in files:
            parts.pop()
        return "/".join(parts) + ".py" if parts else None

    found = {}
    for name in sorted(files - {STUB}):
        named = [full for _, _, full in imports_of(ROOT / name) if full.startswith("headstart.")]
        found[name] = {file_of(full) for full in named} - {None, name}
    return found


def test_imports_lead_down(graph):
    up = [(name, other) for name, others in graph.items() for other in others if floor_of(other) > floor_of(name)]
    assert up == []
    top = {name: Path(name).parts[0] for name in graph}
    strange = [
        (name, other)
        for name, others in graph.items()
        for other in others
        for rooms in STRANGERS
        if top[name] != top.get(other) and {top[name], top.get(other)} <= rooms
    ]
    assert strange == []


def test_files_import_each_other_in_no_circle(graph):
    remaining = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in remaining.items() if not others & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert sorted(remaining) == []


def test_rooms_are_entered_through_their_public_modules(graph):
    wrong, used = [], set()
    for name, others in graph.items():
        for other in others:
            room = room_of(other)
            if room == room_of(name) or room.startswith("kernels") or room == ".":
                continue
            used.add((room, Path(other).stem))
            if not name.startswith("benchmarks/") and Path(other).stem not in PUBLIC.get(room, "").split():
                wrong.append((name, other))
    assert wrong == []
    named = {(room, module) for room, modules in PUBLIC.items() for module in modules.split()}
    assert named - used == set(), "public, and no other room imports it"


def test_rooms_and_files_keep_their_size():
    rooms = {}
    for path in MODULES:
        rooms.setdefault(relative(path.parent), []).append(path)
    assert {room: len(files) for room, files in rooms.items() if len(files) > MOST_FILES} == {}
    written = [*MODULES, *ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "assets").rglob("*.py")]
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in written}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_operation_has_a_test_of_its_name():
    files = [path for path in MODULES if path.is_relative_to(ROOT / "kernels")]
    tests = {path: ROOT / "tests" / path.relative_to(ROOT).with_name(f"test_{path.name}") for path in files}
    assert {relative(path) for path, test in tests.items() if not test.is_file()} == WITHOUT_TEST.keys()


def test_no_file_hides_a_folder():
    """Without an __init__.py `import x` finds x.py, and never the folder x beside it."""
    assert [relative(path) for path in [*MODULES, *ROOT.glob("*.py")] if path.with_suffix("").is_dir()] == []


def test_packages_are_the_folders_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {relative(path.parent) for path in MODULES}
    folders |= {relative(path.parent) for pattern in ("*.yaml", "*.json") for path in (ROOT / "configs").rglob(pattern)}
    assert sorted(listed) == sorted(["headstart", *("headstart." + folder.replace("/", ".") for folder in folders)])


def runs_as_a_script(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)


OUTSIDE = [ROOT / "cli.py", *sorted((ROOT / "assets" / "make").glob("*.py"))]  # the rooms, and above them


@pytest.mark.parametrize("path", [path for path in MODULES + OUTSIDE if relative(path) != STUB], ids=relative)
def test_library_files_import_relatively_and_scripts_absolutely(path):
    if path in OUTSIDE or (runs_as_a_script(path) and relative(path.parent) in SCRIPT_FOLDERS):
        assert [full for _, level, full in imports_of(path) if level] == []
    else:
        assert [full for _, level, full in imports_of(path) if not level and full.split(".")[0] == "headstart"] == []
    # Without the prefix it would work from the checkout only, and `kernels` would be another package.
    bare = [full for _, level, full in imports_of(path) if not level and full.split(".")[0] in (*FOLDERS[1:], "cli")]
    assert bare == []


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
