"""A test may skip only for a reason that is registered: a silent skip hides a dead test.

tests/expected_skips.txt has one pattern (fnmatch, matched against the whole reason) per line, followed by `#` and
why it is fine. An unregistered skip is listed at the end of the run and, where CI is set, fails it.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib

import pytest


def read_patterns(path: pathlib.Path) -> list[str]:
    """The patterns of a file. ValueError, with file and line, for a pattern that does not say why."""
    patterns = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, why = line.partition("#")
        if not pattern.strip() or not why.strip():
            raise ValueError(f"{path}:{number}: expected `pattern  # why`, found {line!r}")
        patterns.append(pattern.strip())
    return patterns


def is_ci() -> bool:
    """Whether the run has to be strict: CI is set to something other than 0, false or nothing."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


class ExpectedSkips:
    """The pytest plugin: collects skips, names the unexpected ones, and fails the session where CI is set."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._patterns = read_patterns(path)
        self.unexpected: list[tuple[str, str]] = []

    def _note(self, nodeid: str, longrepr: object) -> None:
        # pytest gives (file, line, "Skipped: reason").
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
        if not any(fnmatch.fnmatchcase(reason, pattern) for pattern in self._patterns):
            self.unexpected.append((nodeid, reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A skipped test. An expected failure is reported as skipped too, but it has run."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A skipped module: none of its tests is even seen."""
        if report.skipped:
            self._note(report.nodeid, report.longrepr)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn an otherwise good run into a failed one."""
        if (
            self.unexpected
            and is_ci()
            and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name each unexpected skip."""
        if not self.unexpected:
            return
        terminalreporter.section("unexpected skips", red=is_ci(), yellow=not is_ci())
        for nodeid, reason in self.unexpected:
            terminalreporter.line(f"{nodeid}: {reason}")
        terminalreporter.line(f"Register the reason in {self._path} if it is fine to skip for it.")
