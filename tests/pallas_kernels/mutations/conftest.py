"""Planting bugs: the suite's own tests are run on a copy of the package with one text replaced."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from hypothesis import Phase, settings

import pallas_kernels

PACKAGE = Path(pallas_kernels.__file__).parent
TESTS = Path(__file__).parents[1]
# One failure is enough: it need not be made smaller.
settings.register_profile("planted", phases=[Phase.generate], report_multiple_bugs=False)


def replaced(module: str, old: str, new: str) -> str:
    """The text of a module of the package with the only occurrence of `old` replaced."""
    text = (PACKAGE / f"{module}.py").read_text()
    assert text.count(old) == 1, f"{module}.py must have this text once: {old}"
    return text.replace(old, new)


class _Loader(importlib.abc.Loader):
    """Makes a module from a text, without a cache."""

    def __init__(self, path: Path, text: str):
        self.path, self.text = path, text

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.text, str(self.path), "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module of the package, with a text of its own."""

    def __init__(self, module: str, text: str):
        self.name = f"{PACKAGE.name}.{module}"
        self.loader = _Loader(PACKAGE / f"{module}.py", text)

    def find_spec(self, name: str, path: Any = None, target: Any = None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.loader.path, loader=self.loader)


def _pop_package() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def plant() -> Iterator[Callable[[str, str, str], ModuleType]]:
    """`plant(module, old, new)` imports the package anew with one text replaced; the real one is
    back after the test."""
    finders: list[_Finder] = []
    real = _pop_package()

    def plant(module: str, old: str, new: str) -> ModuleType:
        finders.append(_Finder(module, replaced(module, old, new)))
        sys.meta_path.insert(0, finders[-1])
        return importlib.import_module(PACKAGE.name)

    yield plant
    for finder in finders:
        sys.meta_path.remove(finder)
    _pop_package()
    sys.modules.update(real)


@pytest.fixture
def run_suite(request) -> Callable[..., None]:
    """`run_suite(package, test, parameters)` runs a test of the suite, "file.function", on a copy
    of the package."""

    def run_suite(package: ModuleType, test: str, parameters: dict[str, Any]) -> None:
        file, function = test.split(".")
        spec = importlib.util.spec_from_file_location(f"planted_{file}", TESTS / f"{file}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        settings.load_profile("planted")
        try:
            spec.loader.exec_module(module)
        finally:
            settings.load_profile("default")

        def attend(*arguments, backend, static_window=None, window=None, **keywords):
            """As the fixture, but of the copy; the reference is the real package's."""
            if backend == "reference":
                keywords |= {"static_window": static_window, "window": window}
                return request.getfixturevalue("attend")(*arguments, backend=backend, **keywords)
            window = static_window if window is None else window
            keywords |= {"window": window, "backend": backend, "scale": 0.4, "return_lse": True}
            return jax.jit(lambda *arrays: package.paged_attention(*arrays, **keywords))(*arguments)

        known = parameters | {"attend": attend}
        names = inspect.signature(getattr(module, function)).parameters
        getattr(module, function)(
            **{
                name: known[name] if name in known else request.getfixturevalue(name)
                for name in names
            }
        )

    return run_suite


@pytest.fixture
def run_child(tmp_path) -> Callable[..., tuple[int | None, str]]:
    """`run_child(node, limit, bug)` runs a test, "file.py::function[parameters]", in a process of
    its own on a copy of the package, with `bug` (module, old, new) if there is one; returns its
    exit status and what it printed. Past `limit` seconds it is killed, and the status is None."""

    def run_child(
        node: str, limit: float, bug: tuple[str, str, str] | None = None
    ) -> tuple[int | None, str]:
        copy = Path(tempfile.mkdtemp(dir=tmp_path)) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if bug is not None:
            (copy / f"{bug[0]}.py").write_text(replaced(*bug))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--tb=short",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-m", "", f"--rootdir={TESTS.parents[1]}", f"--confcutdir={TESTS}"]
        command += ["-c", str(TESTS.parents[1] / "pyproject.toml"), str(TESTS / node)]
        try:
            done = subprocess.run(
                command, cwd=copy.parent, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run_child
