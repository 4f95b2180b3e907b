"""`--import`: modules in the current folder are found, and one that fails is one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODES = """
from megatron_lossagg import register_mode

register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))
register_mode("plain-sum", lambda n_s, c: n_s.new_ones(()), checksum=lambda c: c.num_tokens)
"""


@pytest.fixture
def command(tmp_path):
    """Runs the console script, whose folder, not the current one, is on sys.path."""
    script = tmp_path / "bin" / "console_script.py"
    script.parent.mkdir()
    script.write_text("from megatron_lossagg.cli import main\nif __name__ == '__main__': main()\n")
    current = tmp_path / "current"
    current.mkdir()
    (current / "my_modes.py").write_text(MODES)
    environment = {**os.environ, "COLUMNS": "250"}
    environment.pop("MEGATRON_LOSSAGG_IMPORT", None)

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=current,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    run.folder = current
    return run


def test_modes_lists_what_was_imported(command):
    """With the module that registered it; by the option or the variable."""
    by_option = command("--import", "my_modes", "modes")
    assert by_option.returncode == 0, by_option.stderr
    for name, total in (
        ("sqrt-length", "compared with the plan"),
        ("plain-sum", "what its checksum in my_modes computes (no formula given)"),
    ):
        [_, of_mode] = by_option.stdout.split(f"\n{name}\n")
        by, formula, *_ = of_mode.splitlines()
        assert by == f"    registered by my_modes ({command.folder}/my_modes.py)"
        assert formula.startswith(
            "    w = its function in my_modes (no formula given)  sum of w = "
        )
        assert total in formula
    assert command("modes", MEGATRON_LOSSAGG_IMPORT="my_modes").stdout == by_option.stdout
    assert "my_modes" not in command("modes").stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "ModuleNotFoundError: No module named 'broken'"),
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero ({folder}/broken.py, line 2)"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("raise SystemExit('no')\n", "SystemExit: no ({folder}/broken.py, line 1)"),
        (
            MODES.replace("sqrt-length", "token-sum"),
            "ValueError: register_mode: 'token-sum' exists already; choose another name. "
            "({folder}/broken.py, line 4)",
        ),
    ],
)
def test_a_module_that_cannot_be_imported(command, text, reason):
    """One line with the module, the error and where it was looked for; exit code 2."""
    if text is not None:
        (command.folder / "broken.py").write_text(text)
    done = command("--import", "my_modes,broken", "modes")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "megatron-lossagg: cannot import 'broken', named by --import or MEGATRON_LOSSAGG_IMPORT: "
        f"{reason.format(folder=command.folder)}. Looked in PYTHONPATH, the installed packages and "
        f"the current folder {command.folder}."
    ]


def test_an_unknown_mode_names_the_option(command):
    """In each command that takes modes."""
    for arguments in (
        ("doctor", "--loss-agg-mode", "sqrt-length"),
        ("verify", "--modes", "sqrt-length"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert "--import MODULE" in done.stderr and "MEGATRON_LOSSAGG_IMPORT" in done.stderr


def test_a_folder_here_hides_no_installed_package(command):
    """The current folder comes last: a checkout that lies there is not imported instead."""
    (command.folder / "rich").mkdir()
    (command.folder / "rich" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    done = command("--import", "my_modes", "modes")
    assert done.returncode == 0, done.stderr


def test_ranks_find_the_module_too(command):
    """`verify` starts processes; each imports it from here."""
    options = ("--modes", "sqrt-length", "--layouts", "DP=2 M=2", "--regimes", "R1")
    done = command("--import", "my_modes", "verify", *options, "--planning", "wrap")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sqrt-length" in done.stdout and "OK: 1 cases exact" in done.stdout
