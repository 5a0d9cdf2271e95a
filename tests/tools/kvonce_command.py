"""The command that a test script gets as its first argument."""

import os
import subprocess
import sys

KVONCE = sys.argv.pop(1) if len(sys.argv) > 1 else "kvonce"


def kvonce(*arguments, **environment):
    """Runs it with further environment variables; returns the finished process and what it printed."""
    return subprocess.run([KVONCE, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, **environment})
