"""JAX's persistent compilation cache."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compilation_cache(folder: str) -> None:
    """Keep compiled programs in `folder`, which is made if need be, for later processes.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(
            f"compilation_cache_dir must be a folder that can be written, got {folder!r}"
        )
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default JAX keeps only programs that took over a second to compile, and stores nothing
    # of ours.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Had anything been compiled before, JAX would have settled on having no cache (or another).
    compilation_cache.reset_cache()
