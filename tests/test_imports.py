"""Who may import whom (design.md's contract), read from the source and tried without jax."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package or module of ours: what of ours it may import, besides itself. `validation` holds the
# checks that config and sampling_params share.
ALLOWED = {
    "jpaged.memory": set(),
    "jpaged.scheduling": {"jpaged.memory", "jpaged.config", "jpaged.sampling_params"},
    "jpaged.simulation": {"jpaged.scheduling", "jpaged.memory"},
    "jpaged.runner": {"jpaged.models", "jpaged.parallel", "pallas_kernels"},
    "jpaged.models": {"pallas_kernels"},
    "jpaged.validation": set(),
    "jpaged.sampling_params": {"jpaged.validation"},
    "jpaged.config": {"jpaged.sampling_params", "jpaged.validation"},
    "jpaged.outputs": set(),
    "jpaged.detokenizer": set(),
    "jpaged.compilation_cache": set(),
    "jpaged.flags": {"jpaged.config", "jpaged.sampling_params"},
    "pallas_kernels": set(),
}
ABOVE_THE_ENGINE = {"jpaged.engine", "jpaged.llm", "jpaged"}
WITHOUT_JAX = ("jpaged.memory", "jpaged.scheduling", "jpaged.simulation")


def unit_of(module):
    """ "jpaged.memory.block_pool" -> "jpaged.memory", "pallas_kernels.xla" -> "pallas_kernels"."""
    depth = 1 if module.split(".")[0] == "pallas_kernels" else 2
    return ".".join(module.split(".")[:depth])


def name_of(path, root=ROOT):
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports(path, root=ROOT):
    """Absolute names of everything that a file imports, wherever in it the import stands."""
    module = name_of(path, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from jpaged import memory` imports jpaged.memory
            if base in ("jpaged", "pallas_kernels"):
                yield from (f"{base}.{alias.name}" for alias in node.names)
            else:
                yield base


def sources():
    return sorted(
        p for package in ("jpaged", "pallas_kernels") for p in (ROOT / package).rglob("*.py")
    )


def ours(path, root=ROOT):
    return {
        unit_of(name)
        for name in imports(path, root)
        if name.split(".")[0] in ("jpaged", "pallas_kernels")
    }


def test_the_reader_of_imports_sees_them_all(tmp_path):
    folder = tmp_path / "jpaged" / "memory"
    folder.mkdir(parents=True)
    file = folder / "pool.py"
    file.write_text(
        "import os\nfrom jpaged import engine\nfrom ..runner.batch import x\nfrom . import y\n"
        "def f():\n    import pallas_kernels.xla\n    from jpaged.llm import LLM\n"
    )
    assert ours(file, tmp_path) == {
        "jpaged.engine",
        "jpaged.runner",
        "jpaged.memory",
        "pallas_kernels",
        "jpaged.llm",
    }


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_who_imports_whom(path):
    unit = unit_of(name_of(path))
    found = ours(path) - {unit}
    if unit in ALLOWED:
        assert found <= ALLOWED[unit]
    if unit not in ABOVE_THE_ENGINE:
        assert not found & ABOVE_THE_ENGINE


def test_memory_scheduling_and_simulation_import_without_jax():
    program = textwrap.dedent(
        """
        import importlib, importlib.util, pkgutil, sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("jax", "jaxlib", "flax", "transformers", "torch"):
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Blocker())
        import jpaged
        assert set(jpaged.__all__) <= set(dir(jpaged))
        jpaged.SamplingParams(), jpaged.EngineConfig(), jpaged.RequestOutput
        for name in sys.argv[1:]:
            if importlib.util.find_spec(name) is None:
                continue
            package = importlib.import_module(name)
            for module in pkgutil.walk_packages(package.__path__, name + "."):
                importlib.import_module(module.name)
            print(name)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *WITHOUT_JAX],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"jpaged.memory", "jpaged.scheduling"} <= set(done.stdout.split())


def test_an_unknown_name_is_an_attribute_error():
    import jpaged

    with pytest.raises(AttributeError, match=r"jpaged.*no attribute 'Nonsense'"):
        _ = jpaged.Nonsense
