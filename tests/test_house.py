"""The rules of the house that a machine can check: docstrings, the arrow of imports, sizes, excepts, paths, configs."""

import ast
import inspect
import operator
import re
import tokenize
from pathlib import Path

import pytest

import logitless
from logitless import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "logitless"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

FILE_LINES = 500
FUNCTION_LINES, KERNEL_LINES = 80, 120

FOUNDATION = {"_arrays", "heads"}
MAY_IMPORT = {
    "_arrays.py": set(),
    "_files.py": set(),
    "heads.py": set(),
    "gradcheck.py": FOUNDATION | {"_gradcheck_arrays"},
    "audit.py": FOUNDATION | {"_audit_axes", "_audit_hlo", "_audit_trace"},
    "plan": FOUNDATION | {"_files", "plan"},
    "source_audit": FOUNDATION | {"_files", "source_audit"},
    "__main__.py": {"cli"},
    "losses/linear.py": FOUNDATION | {"losses", "ops"},
    "losses/linear_distillation.py": FOUNDATION | {"losses", "ops"},
    "ops": FOUNDATION | {"ops"},
    "losses": FOUNDATION | {"losses"},
}
"""What of ours each module or folder may import; those not named here sit on top and may import all but the command."""


def relative(path):
    return path.relative_to(ROOT).as_posix()


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def public_names():
    """Those that `__init__.py` exports as `from .x import y as y`, whether at once or lazily."""
    imports = [node for node in ast.walk(tree(PACKAGE / "__init__.py")) if isinstance(node, ast.ImportFrom)]
    return sorted({alias.name for node in imports for alias in node.names if alias.asname == alias.name})


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_explained(name):
    value = operator.attrgetter(name)(logitless)
    doc = inspect.getdoc(value) or ""
    assert doc, f"logitless.{name} has no docstring"
    if inspect.isfunction(value):
        wanted = ["Returns:", "Example:"] + (["Args:"] if inspect.signature(value).parameters else [])
        missing = [section for section in wanted if section not in doc]
        assert not missing, f"the docstring of logitless.{name} has no {', '.join(missing)} (STYLE rule 10)"
        assert ">>>" in doc, f"the example of logitless.{name} does not run as a doctest"


def imports_of_ours(path):
    """Our modules that a file imports, by their first name below the package: `ops`, `_arrays`, ..."""
    inside = ("logitless", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("logitless.")}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_the_arrow_of_imports(path):
    name = path.relative_to(PACKAGE).as_posix()
    folder = name.split("/")[0]
    ours = imports_of_ours(path)
    if name == "__init__.py":
        return
    if name.startswith(("_audit_", "_gradcheck_")):
        allowed = MAY_IMPORT[name.split("_")[1] + ".py"]
    else:
        allowed = MAY_IMPORT.get(name, MAY_IMPORT.get(folder))
    if allowed is None:
        assert "cli" not in ours, "nothing imports the command"
    else:
        assert ours <= allowed, f"{name} imports {sorted(ours - allowed)}; DESIGN.md's arrow allows {sorted(allowed)}"


def test_the_arrow_is_read_from_every_kind_of_import(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "losses").mkdir()
    path = tmp_path / "losses" / "x.py"
    path.write_text(
        "import logitless.ops.api\nfrom logitless import gradcheck\nfrom ..bench import run\nfrom . import kl\n"
    )
    assert imports_of_ours(path) == {"ops", "gradcheck", "bench", "losses"}


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
def test_no_file_and_no_function_is_too_long(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{relative(path)} has {lines} lines; a room is missing"
    cap = KERNEL_LINES if path.stem.endswith("_kernels") else FUNCTION_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = lines_of(node)
            assert length <= cap, f"{relative(path)}: {node.name} has {length} lines without its docstring"


def lines_of(node):
    """Lines of a function, its docstring left out."""
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return length


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
def test_nothing_is_caught_broadly(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"all"}
            broad = caught & {"Exception", "BaseException", "all"}
            assert not broad, f"{relative(path)}:{node.lineno} catches {broad.pop()}; name the errors that are expected"


PATH = re.compile(
    r"(?<![\w./-])(?:src|tests|docs|configs|ops|losses|bench|train|integrations)/[\w./-]*\w\.(?:py|yaml|md)\b"
)


def words_about_code(path):
    """Comments and docstrings of a module, or a whole document."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    nodes = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n".join(comments + [ast.get_docstring(node) or "" for node in nodes])


@pytest.mark.parametrize("path", [path for path in SOURCES + TESTS if path != Path(__file__)] + DOCUMENTS, ids=relative)
def test_every_path_that_is_named_exists(path):
    for name in set(PATH.findall(words_about_code(path))):
        found = any((folder / name).exists() for folder in (ROOT, PACKAGE, path.parent))
        assert found, f"{relative(path)} names {name}, which does not exist"


def test_every_config_has_an_example_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [relative(path) for path in CONFIGS if relative(path) not in readme]
    assert not missing, f"README.md does not name {', '.join(missing)}"


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_config_parses(path):
    names = {name.split()[-1]: name for name in (*cli.SECOND_WORDS, *cli.JOBS)}
    command = next((names[word] for word in names if path.name.startswith(f"{word}_")), "bench")
    assert cli.read_config(command, [str(path)]) is not None


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_no_test_is_skipped_without_a_reason(path):
    for node in ast.walk(tree(path)):
        # As a decorator without a call, a mark has no place for its reason.
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bare = [ast.unparse(d) for d in node.decorator_list if isinstance(d, ast.Attribute)]
            assert not {"pytest.mark.skip", "pytest.mark.xfail"} & set(bare), f"{relative(path)}: {node.name}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            reasoned = any(keyword.arg == "reason" for keyword in node.keywords)
            if name in ("pytest.skip", "pytest.xfail", "pytest.mark.skip", "pytest.importorskip"):
                assert node.args or reasoned, f"{relative(path)}:{node.lineno}: {name} without a reason"
            if name in ("pytest.mark.skipif", "pytest.mark.xfail"):
                assert reasoned, f"{relative(path)}:{node.lineno}: {name} without a reason"
