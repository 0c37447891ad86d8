"""Reads PTX: the kernels in it, their tensor-core and copy instructions, registers by ptxas."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Tensor-core and copy instructions, by the name they are counted under. An instruction counts under
# the first that matches. `cp.async` alone also has commit and wait forms, which move nothing.
_FAMILIES = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05.mma": r"tcgen05\.mma",
    "mma.sync": r"mma\.sync",
    "ldmatrix": r"ldmatrix",
    "stmatrix": r"stmatrix",
    "cp.async.bulk.tensor": r"cp\.async\.bulk\.tensor",
    "cp.async.bulk": r"cp\.async\.bulk\.(?!commit_group|wait_group|prefetch)",
    "cp.async": r"cp\.async\.c[ag]",
    "ld.global": r"ld\.global",
    "st.global": r"st\.global",
    "atom.global": r"(?:atom|red)\.global",
}
_INSTRUCTION = re.compile(
    r"(?<![\w.%$])(?:"
    + "|".join(f"(?P<i{i}>{pattern})" for i, pattern in enumerate(_FAMILIES.values()))
    + ")"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*")

INSTALL_PTXAS = "reading registers needs ptxas: pip install nvidia-cuda-nvcc-cu12"


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes of a streaming multiprocessor."""

    registers: int  # a thread
    spill_bytes: int  # a thread: the larger of its spill stores and spill loads
    shared_bytes: int  # a block: static and dynamic shared memory
    threads: int  # a block
    pallas: bool  # made by Pallas, not by XLA
    instructions: Counter[str]  # see `instruction_counts`


def instruction_counts(ptx: str) -> Counter[str]:
    """Tensor-core and copy instructions in the text of a PTX module, by family.

    Counts places in the code, not executions. Families: wgmma, tcgen05.mma, mma.sync, ldmatrix,
    stmatrix, cp.async.bulk.tensor, cp.async.bulk, cp.async, ld.global, st.global, atom.global;
    one that does not occur counts 0.
    """
    names = list(_FAMILIES)
    found = _INSTRUCTION.finditer(_COMMENT.sub("", ptx))
    return Counter(names[int(str(match.lastgroup)[1:])] for match in found)


def entries(ptx: str) -> dict[str, str]:
    """The text of each kernel (`.entry`) in a PTX module, by name."""
    parts = _ENTRY.split(ptx)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def threads(entry: str) -> int:
    """Threads a block that a kernel is compiled for, 0 if its text does not say."""
    match = _THREADS.search(entry)
    if match is None:
        return 0
    x, y, z = (int(size or 1) for size in match.groups())
    return x * y * z


def find_ptxas() -> list[Path]:
    """The ptxas programs of the installed NVIDIA wheels and of the search path, newest CUDA first.

    Raises FileNotFoundError, saying what to install, if there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = [
        root / package / "bin" / "ptxas" for package in ("cu13", "cuda_nvcc") for root in roots
    ]
    if on_path := shutil.which("ptxas"):
        found.append(Path(on_path))
    found = [path for path in found if path.exists()]
    if not found:
        raise FileNotFoundError(INSTALL_PTXAS)
    return found


def run_ptxas(ptx: str) -> str:
    """What `ptxas -v` says about a PTX module, compiled for the target that the module names.

    Raises FileNotFoundError if there is no ptxas, RuntimeError if none takes the module.
    """
    target = _TARGET.search(ptx)
    if target is None:
        raise ValueError(f"ptx must name its target, got {ptx[:60]!r}")
    for ptxas in find_ptxas():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "module.ptx"
            source.write_text(ptx)
            command = [str(ptxas), "-v", f"-arch={target[1]}", "-o", f"{folder}/cubin", str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stderr
    raise RuntimeError(f"{ptxas} cannot compile the module: {done.stderr.strip()}")


def ptxas_resources(log: str) -> dict[str, tuple[int, int, int]]:
    """{kernel: (registers, spill bytes, static shared bytes)} from what `ptxas -v` wrote."""
    resources = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        spill = max(number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"))
        resources[name] = (number(r"Used (\d+) registers"), spill, number(r"(\d+) bytes smem"))
    return resources
