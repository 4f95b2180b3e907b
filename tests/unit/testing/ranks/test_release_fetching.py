"""Releases of Megatron-Core: fetching them, ranks that import one, and what counts as passed.

Wheels here are small stand-ins in a local folder; the real ones are in tests/megatron.
"""

from __future__ import annotations

import sys
import zipfile
from types import ModuleType

import pytest
import torch

from megatron_lossagg.cli.verify.releases_table import chosen_releases
from megatron_lossagg.testing import Layout, RankFailure, RankPool
from megatron_lossagg.testing.ranks.releases import RELEASES, FetchError, fetch, imported_release
from megatron_lossagg.verification.cases import Case, CaseResult, ModeResult
from megatron_lossagg.verification.release_matrix import MatrixEntry, is_refused

VERSION = "0.13.1"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(folder, tag="py3-none-any"):
    info = f"megatron_core-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"megatron_core-{VERSION}-{tag}.whl", "w") as wheel:
        wheel.writestr("megatron/core/__init__.py", f"__version__ = {VERSION!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {VERSION}\n"
        )
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_fetch_unpacks_a_wheel_once(tmp_path, index):
    """Of another interpreter if there is none for this one; nothing else is left behind."""
    make_wheel(index, "cp312-cp312-manylinux2014_x86_64")
    target = fetch(VERSION, tmp_path / "releases")
    assert (target / "megatron" / "core" / "__init__.py").is_file()
    assert [path.name for path in (tmp_path / "releases").iterdir()] == [VERSION]
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(VERSION, tmp_path / "releases") == target


def test_fetch_says_what_it_tried(tmp_path, index, monkeypatch):
    """Nothing there, or an index that does not answer: why, and the command; nothing is left."""
    with pytest.raises(FetchError, match=r"No matching.*pip download.* megatron-core==0\.13\.1"):
        fetch(VERSION, tmp_path / "releases")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"not reached.*pip download.* megatron-core==0\.13\.1"):
        fetch(VERSION, tmp_path / "releases")
    assert list((tmp_path / "releases").iterdir()) == []


def test_fetch_looks_at_the_version(tmp_path):
    """A folder with another release in it is not taken for the one of its name."""
    (tmp_path / VERSION / "megatron_core-0.12.0.dist-info").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"0\.13\.1, but holds megatron_core-0\.12\.0"):
        fetch(VERSION, tmp_path)


def a_tensor_under_another_loader():
    """Megatron 0.17 and later put a function of theirs there."""
    torch.storage._load_from_bytes = lambda content: None
    return torch.arange(3)


def import_another():
    other = ModuleType("megatron.core")
    other.__file__ = torch.__file__
    sys.modules["megatron.core"] = sys.modules["megatron"].core = other


def test_ranks_import_the_given_release(tmp_path, index):
    """And say so if they have another; the process of the pool has nothing to do with it."""
    make_wheel(index)
    source = fetch(VERSION, tmp_path / "releases")
    before = list(sys.path)
    with RankPool(1, megatron_core=source) as pool:
        [(version, file)] = pool.run(imported_release)
        assert (version, file) == (VERSION, str(source / "megatron" / "core" / "__init__.py"))
        [tensor] = pool.run(a_tensor_under_another_loader)
        assert tensor.tolist() == [0, 1, 2]
        pool.run(import_another)
        with pytest.raises(RankFailure, match="must import Megatron-Core from"):
            pool.run(imported_release)
    assert sys.path == before


def test_a_folder_without_megatron_is_refused(tmp_path):
    """Before any process is started."""
    with pytest.raises(ValueError, match="folder with megatron/core in it, got"):
        RankPool(1, megatron_core=tmp_path)


def test_chosen_releases():
    """ "all", or some of them."""
    assert chosen_releases("all") == [release.version for release in RELEASES]
    assert chosen_releases(" 0.19.2, 0.12.3,0.19.2") == ["0.19.2", "0.12.3"]
    with pytest.raises(ValueError, match=r"'0\.11\.0' is not one of the proved releases: 0\.12\.3"):
        chosen_releases("0.11.0")
    with pytest.raises(ValueError, match="names none"):
        chosen_releases(",")


def test_what_passes():
    """Exact results, and a refusal that the release needs; not a refusal elsewhere, nor no run."""
    case = Case(Layout.parse("C=2 D=2 M=2"), "R3")
    assert [release.version for release in RELEASES if is_refused(release.version, case)] == [
        "0.12.3"
    ]
    assert not is_refused("0.12.3", Case(Layout.parse("D=2 M=2"), "R3"))
    refused = MatrixEntry("0.12.3", case, reason="...", is_refusal=True)
    not_run = MatrixEntry("0.12.3", case, reason="no triton")
    exact = MatrixEntry("0.13.1", case, CaseResult(case, (ModeResult("token-mean", 1e-8, 0.0),)))
    wrong = MatrixEntry("0.13.1", case, CaseResult(case, (ModeResult("token-mean", 1e-8, 1e-3),)))
    outcomes = [(entry.passed, entry.outcome) for entry in (refused, not_run, exact, wrong)]
    assert outcomes == [
        (True, "refused"),
        (False, "not run: no triton"),
        (True, "1e-06"),
        (False, "FAILED: 1e-03"),
    ]
