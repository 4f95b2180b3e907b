"""`megatron-lossagg modes`: every name whole at any width, and plain text wherever it goes."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from megatron_lossagg.config.presets import REFUSED, preset_names
from megatron_lossagg.modes import mode_names
from megatron_lossagg.modes.options import OPTION_NAMES

COMMAND = [sys.executable, "-m", "megatron_lossagg.cli", "modes"]
NAMES = {*mode_names(), "length-power-A", *preset_names(), *REFUSED, *OPTION_NAMES}


def piped(width, **variables):
    environment = {**os.environ, "COLUMNS": str(width), **variables}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def in_a_terminal(width):
    """Without COLUMNS: the width is asked of the terminal."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    with subprocess.Popen(COMMAND, env=environment, stdout=child, stdin=child) as process:
        os.close(child)
        output = b""
        try:
            while part := os.read(parent, 4096):
                output += part
        except OSError:
            pass  # how Linux says that the other end is closed
    os.close(parent)
    assert process.returncode == 0
    return output.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 80])
def test_no_name_is_broken(width):
    """Each name stands whole on a line, no line is wider; a terminal and a pipe get the same."""
    text = piped(width)
    missing = [name for name in NAMES if not any(name in line for line in text.splitlines())]
    assert not missing
    ends = [line.split()[-1] for line in text.splitlines() if line.strip()]
    assert not [word for word in ends if word.endswith("-")]
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text and text == piped(width, NO_COLOR="1")
    assert in_a_terminal(width) == text


def test_the_formulas_of_a_mode():
    """One block per variant: its weight, their sum, and the options that it reads."""
    blocks = piped(100).split("seq-mean-token-sum-norm\n    norm_semantics: ")
    assert blocks[1].splitlines()[:3] == [
        "sum",
        "    w = 1 / L                sum of w = T / L",
        "    reads loss_scale_factor, norm_semantics",
    ]
    assert blocks[2].splitlines()[1] == "    w = 1 / (B * L)          sum of w = T / (B * L)"
