#!/usr/bin/env python3
"""Runs every *_test.py beside this file, or of another folder, against the installed package.

usage: run.py [--junit FILE] [--tests FOLDER] [--file PATTERN] [NAME...]
NAME: any part of a test's id; FILE: as scripts/sum_tests.py reads it; PATTERN: of file names, default *_test.py
Exit 1 when a test failed or none ran.
"""
import argparse
import pathlib
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent


class Result(unittest.TextTestResult):
    """Keeps each test's id, state (run, fail or notrun, the words of ctest), seconds and text."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cases = {}
        self.started = 0.0

    def keep(self, test, state, text=""):
        if self.cases.get(test.id(), ("", 0.0, ""))[0] != "fail":
            self.cases[test.id()] = (state, time.monotonic() - self.started, text)

    def startTest(self, test):
        self.started = time.monotonic()
        super().startTest(test)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.keep(test, "run")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.keep(test, "fail", self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self.keep(test, "fail", self.errors[-1][1])

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.keep(test, "fail", f"{subtest}: {err[1]}")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.keep(test, "notrun", reason)


def flatten(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flatten(test)
        else:
            yield test


def write_junit(path, suite, cases):
    root = ElementTree.Element("testsuite", name=suite, tests=str(len(cases)))
    for name, (state, seconds, text) in cases.items():
        case = ElementTree.SubElement(root, "testcase", name=f"{suite}.{name}", status=state, time=f"{seconds:.3f}")
        if state != "run":
            ElementTree.SubElement(case, "failure" if state == "fail" else "skipped", message=text)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--junit", type=pathlib.Path)
    parser.add_argument("--tests", type=pathlib.Path, default=HERE)
    parser.add_argument("--file", default="*_test.py")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    folder = str(arguments.tests.resolve())
    sys.path.insert(0, folder)
    tests = [test for test in flatten(unittest.defaultTestLoader.discover(folder, pattern=arguments.file))
             if not arguments.names or any(name in test.id() for name in arguments.names)]
    result = unittest.TextTestRunner(resultclass=Result, verbosity=2).run(unittest.TestSuite(tests))
    if arguments.junit:
        write_junit(arguments.junit, arguments.tests.resolve().name, result.cases)
    return 0 if result.wasSuccessful() and result.testsRun > len(result.skipped) else 1


if __name__ == "__main__":
    sys.exit(main())
