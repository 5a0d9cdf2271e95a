"""Turns kvonce on in llama-cpp-python.

    import kvonce.ggml
    kvonce.ggml.load()                                # before the first Llama(...)
    model = llama_cpp.Llama(path, flash_attn=True)    # decode attention now runs here

load() needs libggml-kvonce.so, which `./dev ggml` of the source tree builds for one version of ggml and prints the path of.
"""
from __future__ import annotations

import ctypes
import os
import pathlib

__all__ = ["library", "load", "statistics", "statistics_text"]

_LIBRARY_NAME = "libggml-kvonce.so"
_loaded: ctypes.CDLL | None = None  # the library in use
_COUNTS = "ops_served", "tokens_served", "ops_failed", "times_declined"


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _COUNTS]


def library() -> str:
    """The path that load() takes: of the environment variable KVONCE_GGML_LIBRARY, else the newest of this package's
    folder and of the source tree's build folder. RuntimeError when there is none."""
    named = os.environ.get("KVONCE_GGML_LIBRARY")
    if named:
        if not pathlib.Path(named).is_file():
            raise RuntimeError(f"KVONCE_GGML_LIBRARY: got '{named}', which is no file; build it with `./dev ggml`")
        return named
    here = pathlib.Path(__file__).resolve().parent
    places = [here / _LIBRARY_NAME, here.parents[1] / "build" / "ggml" / "integrations" / "ggml" / _LIBRARY_NAME]
    found = [place for place in places if place.is_file()]
    if not found:
        raise RuntimeError(f"{_LIBRARY_NAME} is neither in {places[0].parent} nor in {places[1].parent}; build it with "
                           "`./dev ggml` and give its path to load() or in KVONCE_GGML_LIBRARY")
    return str(max(found, key=lambda place: place.stat().st_mtime))


def load(path: str | os.PathLike[str] | None = None) -> str:
    """Registers kvonce's device with the ggml of the installed llama-cpp-python and returns the library's path.

    path: of libggml-kvonce.so; default: library(). Call it before a model is made: contexts that exist already do not
    see the device. Calling it again does nothing. ImportError without llama-cpp-python; RuntimeError when the library
    is missing or was built for another ggml, with the reason.
    """
    global _loaded
    import llama_cpp.llama_cpp
    # The handle of libllama sees the libggml that it was linked to, whatever copies of that file there are.
    host = getattr(llama_cpp.llama_cpp, "_lib", None)
    if host is None or not hasattr(host, "ggml_backend_load"):
        raise RuntimeError(f"llama-cpp-python {llama_cpp.__version__} has no ggml_backend_load; kvonce is tried with "
                           "0.3.36")
    if _loaded is not None:
        return _loaded._name
    path = os.fspath(path) if path is not None else library()
    path = os.path.abspath(path)
    try:
        found = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from None
    found.kvonce_ggml_error.restype = ctypes.c_char_p
    found.kvonce_ggml_statistics_text.restype = ctypes.c_char_p
    host.ggml_backend_reg_by_name.restype = host.ggml_backend_load.restype = ctypes.c_void_p
    registered = host.ggml_backend_reg_by_name(b"kvonce")  # by GGML_BACKEND_PATH
    if not registered and not host.ggml_backend_load(path.encode()):
        reason = found.kvonce_ggml_error().decode() or "ggml_backend_load refused it"
        raise RuntimeError(f"llama-cpp-python {llama_cpp.__version__}: {reason}")
    _loaded = found
    return path


def _require_loaded() -> ctypes.CDLL:
    if _loaded is None:
        raise RuntimeError("kvonce.ggml.load() was not called")
    return _loaded


def statistics() -> dict[str, int]:
    """Counts since load(): ops_served and tokens_served (query tokens times layers), ops_failed, times_declined."""
    counts = _Statistics()
    _require_loaded().kvonce_ggml_get_statistics(ctypes.byref(counts))
    return {name: getattr(counts, name) for name in _COUNTS}


def statistics_text() -> str:
    """The same as text, with the kernels that ran and the reasons for what was declined. KVONCE_GGML_STATS=1 prints it
    when the process ends."""
    return _require_loaded().kvonce_ggml_statistics_text().decode()
