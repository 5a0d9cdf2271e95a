"""The source files that the checks look at: what git tracks or would track, by suffix."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE_SUFFIXES = {".h", ".hpp", ".def", ".c", ".cpp", ".cc", ".cu", ".cuh", ".metal"}
SCRIPT_SUFFIXES = {".py", ".sh", ".cmake"}


def source_files(suffixes):
    """Paths relative to ROOT, sorted. Outside a git checkout (a release archive): every file but those under build/."""
    listing = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = [name for name in listing.stdout.split("\0") if name]
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    paths = {pathlib.PurePosixPath(name) for name in names}
    return sorted(path for path in paths
                  if path.suffix in suffixes and path.parts[0] != "build" and (ROOT / path).is_file())
