"""The tests that may be skipped where all tests must run, each with the reason why.

On anybody's machine `make test` skips what cannot run there. `scripts/check` and the workflow set
STRICT_SKIPS=1: then a skipped test that is not in this list fails the run.
"""

import os
import re

import pytest

ALLOWED = {  # the reason that a test gives, a pattern: why it may be skipped
    "not this processor": "another processor's machines run it",
    "no (cgroup v1|overlay|swap|tmpfs) ": "the kernel decides, and who may mount",
    "(xfs|btrfs) cannot be tried here": "the kernel lacks the file system",
    "(swap and )?mounts take root": "the workflow's user is not root; .ci/run is where it can be",
    "this machine has (other |a )?swap": "the tests leave the machine's own swap alone",
    "no file system can be mounted here": "takes root",
    "no cgroup can be created here": "takes root and a hierarchy that can be written",
    "files of this file system live in memory": "they cannot leave the page cache",
    "this kernel does not account for swap": "there is nothing to limit",
    "NO (BROKEN ENGINE|FIREWALL) WAS TRIED: ": "takes root",
    "no peers here": "ten minutes of compiling; the workflow does it once a week",
}
WITHOUT_REGISTRIES = {  # the same, except in the GitHub workflow
    "[A-Z]+ WAS NOT TESTED: its image cannot be pulled": "there is no registry",
    # Not where an engine runs that these tests cannot use, nor where Compose is missing.
    "NO CONTAINER WAS TESTED: (?!there is no Docker Compose|.*: process )": "no engine can run",
    "neither kubectl nor kustomize": "Debian's version is too old for the overlays",
}


def allowed(reason: str) -> bool:
    """Return whether a test that is skipped for this reason fails no run."""
    lists = [ALLOWED] if os.environ.get("GITHUB_ACTIONS") else [ALLOWED, WITHOUT_REGISTRIES]
    return any(re.match(pattern, reason) for patterns in lists for pattern in patterns)


class StrictSkips:
    """A plugin of the process that collects all reports: fails the run for a test left out."""

    def __init__(self) -> None:
        self._left_out: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not allowed(reason):
                self._left_out.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport  # a module may be skipped as a whole

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._left_out and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.section("skipped, and not in tests/allowed_skips.py", red=True)
            for line in self._left_out:
                terminalreporter.line(line)


def watch_skips(config: pytest.Config) -> None:
    """Fail the run for a skipped test that is not in the list, where STRICT_SKIPS asks for it."""
    if os.environ.get("STRICT_SKIPS") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StrictSkips())
