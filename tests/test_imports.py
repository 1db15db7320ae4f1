"""What may import what: nothing optional, no torch and no pickle, and down the floors only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.forked import IMPORTED

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "kos").rglob("*.py"))
# Subclasses of torch's classes: these modules alone import their framework when they are imported.
WITH_TORCH = "kos.interop.torch", "kos.testing.torch"

# The floors of docs/architecture.md: a room may import itself and rooms of lower floors, nothing else of kos.
FLOORS = {
    "commands": 0,
    "errors": 0,
    "dtypes": 0,
    "files": 0,
    "launcher": 0,
    "environment": 0,
    "reporting": 0,
    "cuda": 1,
    "memory": 1,
    "_core": 1,
    "comm": 2,
    "": 2,  # kos/__init__.py, the face of comm
    "testing": 3,
    "doctor": 3,
    "transfer": 3,
    "interop": 3,
    "train": 3,
    "bench": 4,
    "__main__": 4,
}
SAME_FLOOR = {
    ("memory", "cuda"), ("dtypes", "errors"), ("files", "errors"), ("", "comm"), ("errors", ""), ("doctor", "testing"),
    ("errors", "commands"), ("errors", "environment"), ("reporting", "errors"), ("train", "transfer"),
    ("interop", "transfer"), ("testing", "interop"),
}  # fmt: skip

ALLOWED_BY_CORE = {"numpy", "ml_dtypes", "kos"}
ADDED_BY_TRAIN = {"pydantic", "pydantic_core", "rich", "safetensors", "threadpoolctl"}
DEPENDENCIES_OF_THOSE = {
    "annotated_types", "markdown_it", "mdurl", "pygments", "typing_extensions", "typing_inspection"
}  # fmt: skip
NEVER_AT_IMPORT = ("mpi4py.MPI", "torch", "tokenizers", "nccl.core", "matplotlib")
NEVER_BY_KOS_ALONE = (*NEVER_AT_IMPORT, "cuda.bindings", "cuda.core", "pydantic", "rich", "safetensors")

BLOCKER = """
import importlib, importlib.abc, importlib.machinery, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        where = [spec.origin or "", *(spec.submodule_search_locations or [])] if spec else []
        installed = any("site-packages" in place or "dist-packages" in place for place in where)
        if installed and name.partition(".")[0] not in {allowed!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
"""


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of kos that a module belongs to: kos.comm.work -> comm, kos -> ''."""
    return [*module.split("."), ""][1]


@cache
def parsed(file: Path) -> list[ast.stmt]:
    """The import statements of a file."""
    nodes = ast.walk(ast.parse(file.read_text(), filename=str(file)))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement, those inside functions too."""
    for node in parsed(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield node.lineno, node.module or ""
            if node.module == "kos":  # `from kos import comm` names a room, `from kos import init` the face
                for alias in node.names:
                    if alias.name in FLOORS:
                        yield node.lineno, f"kos.{alias.name}"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python that runs code, or with more arguments those of its command line."""
    rest = arguments if len(arguments) > 1 else ("-W", "error", "-c", *arguments)
    return subprocess.run([sys.executable, *rest], cwd=ROOT, capture_output=True, text=True, timeout=60)


def importable(rooms_of_train: bool) -> list[str]:
    names = [name for name in map(module_name, FILES) if (room(name) == "train") == rooms_of_train]
    names = [name for name in names if not name.startswith(WITH_TORCH)]
    return [name for name in names if name != "kos.testing.plugin"]  # which pytest imports


@pytest.mark.parametrize(
    ("train", "allowed"),
    [
        pytest.param(False, ALLOWED_BY_CORE, id="core"),
        pytest.param(True, ALLOWED_BY_CORE | ADDED_BY_TRAIN | DEPENDENCIES_OF_THOSE, id="train"),
    ],
)
def test_every_module_imports_without_mpi_gpu_torch_or_optional_packages(train, allowed):
    modules = importable(rooms_of_train=train)
    assert modules
    done = run_python(BLOCKER.format(allowed=allowed, modules=modules))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("modules", "never"),
    [
        pytest.param(["kos", "kos.testing"], NEVER_BY_KOS_ALONE, id="kos"),
        pytest.param(
            [name for name in map(module_name, FILES) if not name.startswith(WITH_TORCH)], NEVER_AT_IMPORT,
            id="everything",
        ),
    ],
)
def test_an_import_loads_nothing_heavy(modules, never):
    code = "import importlib, sys\n" + "\n".join(f"importlib.import_module({name!r})" for name in modules)
    done = run_python(code + f"\nprint([name for name in {never!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("command", "light"), [
    ("--help", ""), ("--foo", ""), ("train --help", "pydantic"), ("train --foo", "pydantic"),
    ("train --steps x --foo 3", "pydantic"), ("eval --help", "pydantic"), ("tokenize --help", "pydantic"),
    ("sample --help", ""), ("chat --help", ""), ("sample nowhere", "pydantic numpy ml_dtypes safetensors"),
])  # fmt: skip
def test_the_first_word_of_a_command_waits_for_nothing_heavy(command, light):
    """Which takes a second of a core: before help and refusals, and before a model on one rank is read."""
    heavy = {"numpy", "pydantic", "ml_dtypes", "rich", "safetensors", "tokenizers", "kos.comm"} - {*light.split()}
    done = run_python("-X", "importtime", "-m", "kos", *command.split())
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "kos.reporting" in loaded and not loaded & heavy
    assert "Traceback" not in done.stderr and ("kos: error: " in done.stderr) != command.endswith("--help")


def test_processes_are_forked_before_cuda_is_initialised():
    """After ``cuInit`` a forked process cannot use a GPU."""
    code = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in IMPORTED)
    done = run_python(code + "\nfrom kos.cuda.driver import unavailable\nprint(unavailable.cache_info().currsize)")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_imports_go_down_the_floors_only():
    wrong = []
    for file in FILES:
        importer = room(module_name(file))
        assert importer in FLOORS, f"{file.relative_to(ROOT)}: {importer!r} has no floor"
        for line, module in imports(file):
            if module.partition(".")[0] != "kos":
                continue
            imported = room(module)
            ok = (
                imported == importer
                or (importer, imported) in SAME_FLOOR
                or FLOORS.get(imported, 99) < FLOORS[importer]
            )
            if not ok:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {importer or 'kos'} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_import_circle():
    """Imports for types alone, and those inside functions, count."""
    modules = {module_name(file): file for file in FILES}
    arrows = {}
    for name, file in modules.items():
        own = arrows.setdefault(name, set())
        for node in parsed(file):
            if isinstance(node, ast.Import):
                own |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                own |= (inner & modules.keys()) or {node.module}
        own.discard(name)
    done = set()

    def visit(name, path):
        assert name not in path, "an import circle: " + " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in sorted(arrows[name]):
                visit(imported, (*path, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


def test_kos_imports_neither_torch_nor_pickle():
    banned = {"torch", "pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for file in FILES
        if room(module_name(file)) not in ("interop", "bench") and not module_name(file).startswith(WITH_TORCH)
        for line, module in imports(file)
        if module.partition(".")[0] in banned
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("code", ["from kos import init", "from kos.train import fit"])
def test_a_python_without_the_gil_is_refused(code):
    """By the first import of what communicates: torch imports ``kos.interop.autoload`` in every program."""
    program = f"import sys; sys._is_gil_enabled = lambda: False; import kos.interop.autoload; {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    expected = "ImportError: kos: expected the GIL, got a free-threaded Python without it: set PYTHON_GIL=1"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == expected
    again = program.replace("False", "True")
    assert subprocess.run([sys.executable, "-c", again], timeout=60).returncode == 0


CIRCLES = {("device", "train")}
"""Folders of the trainer that import each other. No other pair may; one that no longer does leaves this list."""


def folder(module: str) -> str:
    """kos.train.data.chat -> data; a module right in kos.train -> train."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and (ROOT / "kos/train" / parts[2]).is_dir() else "train"


def at_run_time(file: Path) -> Iterator[str]:
    """The modules that a file imports, without those for annotations alone."""
    tree = ast.parse(file.read_text())
    for each in (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
        each.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"kos.train.{alias.name}" for alias in node.names]
            yield from names if node.module == "kos.train" else [node.module or ""]


def test_folders_of_the_trainer_import_down():
    files = [file for file in FILES if room(module_name(file)) == "train"]
    pairs = {(folder(module_name(file)), folder(module)) for file in files for module in at_run_time(file)
             if module.startswith("kos.train.")}  # fmt: skip
    assert {pair for pair in pairs if pair[::-1] in pairs and pair[0] < pair[1]} == CIRCLES
