"""What stands in for the native module in a package of Python alone (KVONCE_NATIVE=0)."""
import importlib.metadata

__all__ = ["MissingCore"]


class MissingCore:
    """Raises RuntimeError, naming what was asked for and how to get it, for every function of kvonce._core but version."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"kvonce: {name} needs the native module kvonce._core, which this installation leaves out (KVONCE_NATIVE=0); "
            "install kvonce where a C++20 compiler is, without KVONCE_NATIVE=0 (kvonce.mlx on an Apple GPU needs none)")

    @staticmethod
    def version():
        try:
            return importlib.metadata.version("kvonce")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
