"""The table of releases at the end of a run that has tested them."""

from __future__ import annotations

from pathlib import Path

from releases_doc import AGREEMENTS, ENTRIES, as_page, as_table, is_complete


def pytest_terminal_summary(terminalreporter, config):
    entries = config.stash.get(ENTRIES, [])
    if not entries:
        return
    agreements = config.stash.get(AGREEMENTS, [])
    terminalreporter.section("worst relative error on each release of megatron-core")
    for line in as_table(entries, agreements, numbers=True):
        terminalreporter.write_line(line)
    target = config.getoption("--releases-table")
    if target is None:
        return
    if is_complete(entries):
        Path(target).write_text(as_page(entries, agreements), encoding="utf-8")
    written = "written" if is_complete(entries) else "not written: this was not the whole matrix"
    terminalreporter.write_line(f"{target}: {written}")
