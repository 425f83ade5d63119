"""End on time on a slow machine, and say which tests did not run.

`pytest --minutes 60` begins no test after 60 minutes. The summary names what was left out, and how
much it is; it is an error if it is most of them. With `--first N`, the files of `slow_files.txt`
come after all others and begin with the N-th of them, and those before it come last: if N changes
from run to run, no test is left out each time.
"""

import time
from collections import Counter

import pytest

REASON = "out of time"
_STARTED, _END = pytest.StashKey[float](), pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes")
    parser.addoption("--first", type=int, default=0, help="which slow file comes first")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("minutes")
    # Workers of pytest-xdist start later; the time counts from the start of the process above.
    started = getattr(config, "workerinput", {}).get("started", time.time())
    config.stash[_STARTED] = started
    config.stash[_END] = float("inf") if minutes is None else started + 60 * minutes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:  # a worker of pytest-xdist
    node.workerinput["started"] = node.config.stash[_STARTED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if first := config.getoption("first"):
        listed = (config.rootpath / "tests" / "slow_files.txt").read_text().split()
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
        slow = [file for file in files if file in listed]
        place = {file: (index - first) % len(slow) for index, file in enumerate(slow)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], -1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.stash[_END]:
        pytest.skip(REASON)


def left_out(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Return how many tests of each file were left out."""
    return Counter(
        one.nodeid.partition("::")[0]
        for one in reporter.stats.get("skipped", [])
        if isinstance(one.longrepr, tuple) and one.longrepr[2].endswith(REASON)
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    ended = sum(len(reporter.stats.get(name, ())) for name in ("passed", "failed", "skipped"))
    if left_out(reporter).total() > ended / 2:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Name the files with tests that were left out."""
    left = left_out(terminalreporter)
    if not left:
        return
    minutes = config.getoption("minutes")
    terminalreporter.section(f"{left.total()} tests did not run within {minutes:g} minutes")
    for file, count in left.items():
        terminalreporter.line(f"{count:4} of {file}")
