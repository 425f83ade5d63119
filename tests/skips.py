"""Turn a skip into a failure, unless this machine cannot meet what the test needs.

`pytest --no-unexpected-skips`, which is the default where the environment says CI=true.
"""

import os
import platform
import re
import sys
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
USER = os.geteuid() != 0
PROCESSOR = platform.machine() != "x86_64"

# Reason of a skip (a regular expression), why a machine may not meet it, whether this one may not.
NEEDS = [
    (r"needs an attached GPU", "a GPU", True),
    (r"root reads every file", "a user other than root", not USER),
    (r"a (small )?file system cannot be mounted|mounting is not permitted", "CAP_SYS_ADMIN", True),
    (r"another C library", "glibc", platform.libc_ver()[0] != "glibc"),
    (r"several memory nodes", "a machine with one NUMA node", True),
    (r"a kernel without huge pages|a kernel before Linux 6\.1", "a feature of the kernel", True),
    (r"needs torch-xla", "an environment of its own: torch-xla needs another torch", True),
    (r"needs root and apt-get install slurm|no Chromium", "root, to install them", USER),
    (r"needs a filter of system calls", "Linux", sys.platform != "linux"),
    (r"libtpu", "x86-64, the only processor with a TPU compiler", PROCESSOR),
    (r"out of time$", "a faster machine; the summary names all of them", True),
    (r"graphtrain\[ascend\]", "Python before 3.13, for MindSpore", sys.version_info >= (3, 13)),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-unexpected-skips",
        action="store_true",
        default=os.environ.get("CI") == "true",
        help="fail where a test is skipped that this machine could run",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    return _failed_if_unexpected(item.config, report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport]:
    report = yield
    return _failed_if_unexpected(collector.config, report)


def _failed_if_unexpected(config: pytest.Config, report: Report) -> Report:
    if report.skipped and config.getoption("no_unexpected_skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not allowed(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}; this machine could run it (tests/skips.py)"
    return report


def allowed(reason: str) -> bool:
    """Whether a test may be skipped on this machine for this reason."""
    return any(here and re.search(pattern, reason) for pattern, _, here in NEEDS)
