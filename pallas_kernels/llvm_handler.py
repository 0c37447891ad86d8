"""Compiling a handler of LLVM IR (`llvm_build.build_handler`), keeping its object code, and calling
it from XLA.

Object code is kept where JAX keeps compiled programs (`jax_compilation_cache_dir`), so that a later
process links it in a millisecond instead of compiling for half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite
import numpy as np
from llvmlite import binding, ir

logger = logging.getLogger(__name__)

_SPEED_LEVEL = 3  # of LLVM's optimisation


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Handler:
    """A compiled handler, registered with JAX for CPUs; to live as long as the process.

    Attributes:
        name: what `jax.ffi.ffi_call` calls it by. It names the code, since XLA's compiled programs,
            which are kept on disk, call it by name.
    """

    def __init__(self, name: str, module: ir.Module) -> None:
        text = str(module)
        self.name = f"{name}_{_digest(text.encode()).hex()[:16]}"
        machine = _host()
        code = object_code(self.name, text, machine)
        # Owns the machine, and the code once it is linked.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address = self._engine.get_function_address("handler")
        jax.ffi.register_ffi_target(
            self.name, jax.ffi.pycapsule(ctypes.cast(address, ctypes.c_void_p)), platform="cpu"
        )


def _host() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=_SPEED_LEVEL,
        jit=True,
    )


def object_code(name: str, text: str, machine: binding.TargetMachine) -> bytes:
    """The object code of a module of LLVM IR for this machine, kept where JAX keeps compiled
    programs, if it does. Its file's name begins with `name`; JAX evicts none of these files."""
    config: Any = jax.config  # whose attributes mypy does not see
    folder = config.jax_compilation_cache_dir
    # A remote folder, which JAX would write to, is left alone; so is one that is not there yet.
    if not config.jax_enable_compilation_cache or not folder or not os.path.isdir(folder):
        return _compile(text, machine)
    host = machine.triple, binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made_of = (text, llvmlite.__version__, binding.llvm_version_info, *host, _SPEED_LEVEL)
    path = os.path.join(folder, f"{name}_{_digest(repr(made_of).encode()).hex()[:16]}.o")
    code = _read(path)
    if code is None:
        code = _compile(text, machine)
        _write(path, code)
    return code


def _compile(text: str, machine: binding.TargetMachine) -> bytes:
    parsed = binding.parse_assembly(text)
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=_SPEED_LEVEL)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_object(parsed)


def _read(path: str) -> bytes | None:
    """The object code kept at `path`; None if there is none, or it is not what was written."""
    try:
        with open(path, "rb") as file:
            digest, code = file.read(hashlib.sha256().digest_size), file.read()
    except OSError:
        return None
    return code if digest == _digest(code) else None


def _write(path: str, code: bytes) -> None:
    """Keep object code at `path`, behind its digest. Other processes may be writing there too, so
    it is put in its place when it is whole."""
    unfinished = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(unfinished, "xb") as file:  # readable by whoever the user's umask lets read
            file.write(_digest(code) + code)
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("object code could not be kept at %s: %s", path, error)
    finally:
        with contextlib.suppress(OSError):  # it has its own name now
            os.unlink(unfinished)


def call_handler(
    handler: Handler,
    result: Any,
    *arrays: jax.Array,
    units: jax.Array | int,
    alone: jax.Array | bool,
    numbers: Sequence[jax.Array | int],
) -> Any:
    """Calls a handler of `build_handler`.

    result   shape and dtype of what it writes, of several a tuple
    units    how many there are
    alone    whether no other thread is to help
    numbers  int32 scalars. Each is an operand of its own: joined, they would cost a program of
             XLA's a call.
    """
    run = jax.ffi.ffi_call(handler.name, result, vmap_method="sequential")
    most = np.iinfo(np.int32).max
    helpers = (0 if alone else most) if isinstance(alone, bool) else jnp.where(alone, 0, most)
    scalars = (
        np.int32(x) if isinstance(x, int) else x.astype(jnp.int32)
        for x in (units, helpers, *numbers)
    )
    return run(*scalars, *arrays)


_LOCK = threading.Lock()


def compiled_once(make: Callable[..., Handler]) -> Callable[..., Handler]:
    """`make`, called once for the same arguments, whichever threads trace programs: XLA keeps the
    address of what was registered first, so that must not be thrown away for a second one."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def locked(*arguments: Any) -> Handler:
        with _LOCK:
            return cached(*arguments)

    return locked
