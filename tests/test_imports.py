"""The architecture, read from the sources.

Its invariants:

- A module imports those to its left alone; the package itself only re-exports.
- No private name of the libraries underneath is imported or read, so that their releases do not break us.
- Optional libraries are imported by the function that needs them, never by importing the package.
- No module is a drawer for everything, nor longer than one can read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import st_gsinfonce

PACKAGE = Path(st_gsinfonce.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
LIBRARIES = {"sentence_transformers", "transformers", "mteb", "datasets", "torch"}
OPTIONAL = {"mteb", "matplotlib"}
# Documented names of every named tuple, in spite of their underscore.
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}

# Who may import whom; a module that is not listed imports no sibling.
ALLOWED = {
    "losses": {"citations", "columns", "noise", "objective", "streamed"},
    "streamed": {"objective"},
    "cached": {"citations", "columns", "losses"},
    "corpus": {"sources"},
    "sources": {"textfiles"},
    "evaluation": {"provenance", "sts_data", "sts_encoding", "sts_results"},
    "sts_encoding": {"weights"},
    "faults": {"cached", "checkpoints"},
    "training": {
        "checkpoints",
        "collator",
        "encoder",
        "losses",
        "corpus",
        "recipes",
        "evaluation",
        "faults",
        "weights",
        "whole_files",
    },
    "cells": {"losses", "objective"},
    "materials": {
        "cells",
        "corpus",
        "embedded",
        "encoder",
        "evaluation",
        "sts_data",
        "training",
        "weights",
    },
    "experiments": {
        "cells",
        "encoder",
        "materials",
        "provenance",
        "training",
        "weights",
        "whole_files",
    },
    "analysis": {"geometry", "objective"},
    "geometry": {"objective"},
    "diagnostics": {"losses", "objective", "whole_files"},
    "report": {"cells", "significance"},
    "encoder": {"module_list", "whole_folders"},
    "checkpoints": {"module_list"},
    "hub": {"bundle", "card", "encoder", "evaluation", "remote"},
    "bundle": {"encoder", "module_list"},
    "card": {"citations", "evaluation", "sts_data"},
    "figure_data": {"analysis", "report"},
    "plots": {"figure_data", "figure_style"},
    "figure_files": {"figure_data", "figure_style", "plots", "whole_files"},
}


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that an import statement binds, from its top package on."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(root: ast.AST) -> set[str]:
    return {name for node in ast.walk(root) for name in imported(node)}


def dotted(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``, or nothing where it does not start at a plain name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return [*start, node.attr] if start else []
    return []


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in NAMED_TUPLE


def private_names(root: ast.Module) -> set[str]:
    """Return the private names that a module imports, or reads of anything but its own objects."""
    found = {
        name
        for name in imports(root)
        if name.split(".")[0] in LIBRARIES and any(map(is_private, name.split(".")))
    }
    for node in ast.walk(root):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if dotted(node)[:1] not in (["self"], ["cls"]) or len(dotted(node)) > 2:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                found.add(ast.unparse(node))
    return found


def own_privates(root: ast.Module) -> set[str]:
    """Return the private attributes that the module's own classes define."""
    names = {
        node.attr
        for node in ast.walk(root)
        if isinstance(node, ast.Attribute) and dotted(node)[:1] == ["self"]
    }
    for node in ast.walk(root):
        if isinstance(node, ast.ClassDef):
            names |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    return {name for name in names if is_private(name)}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_those_to_its_left(module: str) -> None:
    siblings = set()
    for name in imports(tree(module)):
        top, *rest = name.split(".")
        if top == "st_gsinfonce":
            siblings.add(rest[0] if rest else "__init__")
    assert siblings <= ALLOWED.get(module, set())


def test_the_package_only_re_exports() -> None:
    for node in tree("__init__").body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring:
            continue
        if isinstance(node, ast.Assign):
            assert [ast.unparse(target) for target in node.targets] in (
                ["__version__"],
                ["__all__"],
            )
        else:
            names = list(imported(node))
            assert names and all(name.startswith("st_gsinfonce.") for name in names)
    exported = imports(tree("__init__"))
    names = {name.rsplit(".", 1)[1] for name in exported}
    assert names == set(st_gsinfonce.__all__)
    assert not any(map(is_private, names))


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_no_private_name_of_others_is_used(module: str) -> None:
    root = tree(module)
    own = own_privates(root)
    assert {name for name in private_names(root) if name.rsplit(".", 1)[-1] not in own} == set()


@pytest.mark.parametrize(
    "source",
    [
        "from sentence_transformers.base import _thing",
        "import torch._dynamo",
        "from transformers._sub import thing",
        "def f(model): return model._target_device",
        "def f(self): return self.model._modules",
        "def f(model): return getattr(model, '_modules')",
        "def f(model): return model[0]._buffers",
    ],
)
def test_a_private_name_would_be_found(source: str) -> None:
    assert private_names(ast.parse(source))


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_optional_libraries_are_imported_inside_functions(module: str) -> None:
    root = tree(module)
    for function in ast.walk(root):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function.body = []
        elif isinstance(function, ast.If) and ast.unparse(function.test) == "TYPE_CHECKING":
            function.body = []
    assert not OPTIONAL & {name.split(".")[0] for name in imports(root)}


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_a_module_can_be_read(module: str) -> None:
    assert module != "utils"
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 400
