"""`kvonce check --quick`: passes, in time, ends in the summary line, and shows progress on a terminal only.

Usage: check_quick_test.py KVONCE
"""

import os
import pty
import re
import subprocess
import threading
import time
import unittest

from kvonce_command import KVONCE

MAX_SECONDS = 20


def run_with_terminal(arguments):
    """Runs with standard error on a terminal; returns the finished process and what the terminal received."""
    ours, theirs = pty.openpty()
    received = []

    def read():
        try:
            while chunk := os.read(ours, 4096):
                received.append(chunk)
        except OSError:  # the other side was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return result, b"".join(received).decode()


class CheckQuickTest(unittest.TestCase):
    def test_quick_check(self):
        begin = time.monotonic()
        result, terminal = run_with_terminal([KVONCE, "check", "--quick"])
        seconds = time.monotonic() - begin
        self.assertEqual(result.returncode, 0, result.stdout)
        summary = re.fullmatch(r"(\d+) passed, 0 failed, (\d+) skipped", result.stdout.splitlines()[-1])
        self.assertIsNotNone(summary, result.stdout)
        self.assertGreater(int(summary[1]), 100)
        # Well past the two quiet seconds; two cases are at most a second apart.
        if seconds > 4:
            self.assertIn("checking", terminal)
            self.assertTrue(terminal.endswith("\x1b[K"), repr(terminal[-40:]))
        # Builds with sanitizers, and machines told so, may take longer.
        if os.environ.get("KVONCE_QUICK") != "1" and "asan" not in KVONCE and "tsan" not in KVONCE:
            self.assertLess(seconds, MAX_SECONDS)


if __name__ == "__main__":
    unittest.main()
