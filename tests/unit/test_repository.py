"""Rules about the source itself that no type checker knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mesh", "transport", "roles")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Code runs when these read bytes or text, or torch carries Python objects with them.
FORBIDDEN = re.compile(
    r"\b(c?pickle|_pickle|cloudpickle|dill|marshal|shelve|recv_pyobj|send_pyobj|recv_serialized|send_serialized"
    r"|joblib|jsonpickle|yaml\.(?:load|unsafe_load|full_load)|np\.load|numpy\.load|torch\.jit\.load|hub\.load"
    r"|(?<![.\w])(?:eval|exec|compile|__import__)(?=\()|shell=True|os\.(?:system|popen)"
    r"|torch\.load|weights_only|broadcast_object_list|all_gather_object|gather_object|scatter_object_list"
    r"|send_object_list|recv_object_list|allow_pickle)\b"
)

# What of mesh/ transport/ may import. The pure machines of mesh/ import one thing back: the wire's messages.
BELOW = {"mesh.identity", "mesh.version", "mesh.config", "mesh.effects", "mesh.secret"}
LEAF = "transport.messages"
ON_TOP = {
    f"mesh.{name}" for name in ("peer", "local", "node", "cli", "view", "observer", "top", "doctor", "report")
}  # these bring the three packages together


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def identifiers(path: Path) -> str:
    """The source without comments and strings: prose may speak of what code must not do."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            node.value = ""
    return ast.unparse(tree)


def imports(path: Path, *, at_import_time: bool = False) -> set[str]:
    """The modules of this repository, and torch, that a file imports (also within functions, unless told otherwise)."""
    found = set()
    modules = {module_of(p) for p in SOURCES}

    def visit(node: ast.AST) -> None:
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "torch")}


def test_the_rules_below_see_the_source() -> None:
    assert {"mesh.config", "transport.codec", "transport.endpoint"} <= {module_of(p) for p in SOURCES}
    assert "mesh.secret" in imports(ROOT / "transport" / "endpoint.py")
    assert FORBIDDEN.search("x = torch.load(path)")
    assert not FORBIDDEN.search("torch.loads")
    for code in ("eval(text)", "exec(text)", "yaml.load(file)", "np.load(path)", "run(x, shell=True)", "import dill"):
        assert FORBIDDEN.search(code), code
    for code in ("model.eval()", "re.compile(text)", "yaml.safe_load(file)", "executor(x)"):
        assert not FORBIDDEN.search(code), code


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_nothing_reads_bytes_that_can_run_code(path: Path) -> None:
    assert FORBIDDEN.findall(identifiers(path)) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if module_of(p).startswith("mesh")], ids=module_of)
def test_mesh_imports_torch_nowhere_at_import_time(path: Path) -> None:
    assert {name for name in imports(path, at_import_time=True) if name.split(".")[0] == "torch"} == set()


@pytest.mark.parametrize("module", ["mesh.cli", "mesh.config", "transport.endpoint", "transport.messages"])
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    module = module_of(path)
    used = {name for name in imports(path) if name.split(".")[0] in PACKAGES and name not in PACKAGES}
    match module.split(".")[0]:
        case "transport":
            wrong = {u for u in used if not u.startswith("transport") and u not in BELOW}
        case "roles":
            wrong = set()
        case _ if module in ON_TOP:
            wrong = set()
        case _:
            wrong = {u for u in used if not u.startswith("mesh") and u != LEAF}
    assert wrong == set()


def test_the_messages_are_a_leaf() -> None:
    assert imports(ROOT / "transport" / "messages.py") == {"mesh.identity", "mesh.version"}
