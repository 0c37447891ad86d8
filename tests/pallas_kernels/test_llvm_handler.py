"""Kernels' object code on disk: compiled once for all processes, and never trusted when damaged."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from pallas_kernels import llvm_handler
from pallas_kernels.llvm_handler import object_code

TEXT = 'define i64 @"handler"(i64 %x) {\n  %y = add i64 %x, 1\n  ret i64 %y\n}\n'


@pytest.fixture
def folder(tmp_path):
    """JAX's cache, for the length of a test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def compiled(monkeypatch):
    """The texts that were compiled."""
    texts = []
    compile_text = llvm_handler._compile

    def counting(text, machine):
        texts.append(text)
        return compile_text(text, machine)

    monkeypatch.setattr(llvm_handler, "_compile", counting)
    return texts


@pytest.fixture(scope="module")
def machine():
    return llvm_handler._host()


def test_what_was_kept_is_found_again(folder, compiled, machine):
    first = object_code("add", TEXT, machine)
    assert object_code("add", TEXT, machine) == first
    assert compiled == [TEXT]
    (file,) = folder.iterdir()  # nothing half written is left
    assert file.suffix == ".o"
    plain = folder / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode  # others may read it who may read that
    object_code("add", TEXT.replace("1", "2"), machine)  # a name alone says too little
    assert len(compiled) == 2


DAMAGES = {
    "cut": lambda whole: whole[:-1],
    "empty": lambda whole: b"",
    "longer": lambda whole: whole + b"x",
    "a bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_code_is_compiled_again(folder, compiled, machine, damage):
    first = object_code("add", TEXT, machine)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert object_code("add", TEXT, machine) == first
    assert len(compiled) == 2
    assert file.read_bytes() == whole


OTHERS = {
    "get_host_cpu_name": lambda: "another",
    "get_host_cpu_features": lambda: type("Features", (), {"flatten": lambda self: "+sse"})(),
    "llvm_version_info": (0, 0, 0),
}


@pytest.mark.parametrize("changed", OTHERS)
def test_code_for_another_machine_is_not_taken(folder, compiled, machine, monkeypatch, changed):
    """A home folder may be shared by machines."""
    object_code("add", TEXT, machine)
    monkeypatch.setattr(llvm_handler.binding, changed, OTHERS[changed])
    object_code("add", TEXT, machine)
    assert len(compiled) == 2
    assert len(list(folder.iterdir())) == 2


def test_kept_nowhere_when_jax_keeps_nothing(folder, compiled, machine):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        object_code("add", TEXT, machine)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
    object_code("add", TEXT, machine)
    assert len(compiled) == 2
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_told_of(folder, compiled, machine, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(llvm_handler.os, "replace", refuse)
    assert object_code("add", TEXT, machine)
    assert "could not be kept" in caplog.text
    assert not list(folder.iterdir())


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import pallas_kernels.llvm_handler as handler
from pallas_kernels import llvm_matmul

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
if sys.argv[2] == "again":
    def refuse(*_):
        raise AssertionError("compiled again")
    handler._compile = refuse
x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
w = jnp.asarray(np.random.default_rng(1).standard_normal((2, 64, 96)), jnp.float32)
y = jax.jit(llvm_matmul.multiply)(x, w, 1, 8)
np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w[1]), rtol=2e-5, atol=2e-5)
"""


def test_a_second_process_links_what_the_first_compiled(tmp_path):
    for turn in ("first", "again"):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), turn], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert list(tmp_path.glob("few_rows_product*.o"))


LATE = """
import ctypes, sys
import pallas_kernels.llvm_build as build
from pallas_kernels.llvm_handler import _compile, _host
from llvmlite import binding

def body(work):
    place = work.builder.bitcast(work.arrays[0], build.I64.as_pointer())
    work.builder.store(work.numbers[0], place)

machine = _host()
code = _compile(str(build.build_handler(3, 2, 1, body)), machine)
engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
engine.add_object_file(binding.ObjectFileRef.from_data(code))
engine.finalize_object()
work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("work"))
shared = (ctypes.c_int64 * 64)(*[8] * 64)  # 8 is no address
units = 5
for place, value in ((build._NEXT, units), (build._DONE, units), (build._NUM_UNITS, units),
                     (build._USERS, 2)):
    shared[place // 8] = value
work(ctypes.addressof(shared))
assert shared[build._USERS // 8] == 1 and shared[build._NEXT // 8] == units + 1
"""


def test_a_helper_that_comes_late_reads_nothing_of_xlas():
    """When the handler has returned, its operands may be anywhere."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
