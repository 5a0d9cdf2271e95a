#!/usr/bin/env python3
"""Sums ctest's JUnit files: the names of failed and skipped tests, then `N passed, N failed, N skipped`.

usage: sum_tests.py FILE.xml...   exit 1 when a test failed or none ran
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main():
    totals = {"run": 0, "fail": 0, "notrun": 0}
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        if not path.is_file():
            continue
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            # ctest's states: run (passed), fail, notrun (skipped, or its program is missing), disabled.
            status = case.get("status", "fail")
            if status == "notrun" and case.find("failure") is not None:
                status = "fail"
            status = "notrun" if status == "disabled" else status
            totals[status if status in totals else "fail"] += 1
            if status != "run":
                print(f"{'skipped' if status == 'notrun' else 'failed'} in {path.stem}: {case.get('name')}")
    print(f"{totals['run']} passed, {totals['fail']} failed, {totals['notrun']} skipped")
    return 1 if totals["fail"] or not totals["run"] else 0


if __name__ == "__main__":
    sys.exit(main())
