# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from randkv import patching
from randkv.errors import RandKVPatchError

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm-integration.md"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The touched files of the installed vLLM, to patch and unpatch at will."""
    installed = patching.find_vllm()
    for name in [sums.path for sums in patching.read_sums()] + [patching.STAMP_NAME]:
        target = tmp_path / "vllm" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / name, target)
    monkeypatch.setattr(patching, "find_vllm", lambda: tmp_path / "vllm")
    return tmp_path / "vllm"


def test_the_installed_vllm_is_patched() -> None:
    assert patching.check() == patching.digest()


def test_revert_then_apply_gives_the_same_files(copy: Path) -> None:
    files = len(patching.read_sums())
    after = {p: p.read_bytes() for p in copy.rglob("*.py")}
    assert patching.revert() == files
    assert all(p.read_bytes() != text for p, text in after.items())
    assert patching.revert() == 0
    with pytest.raises(RandKVPatchError, match="not patched"):
        patching.check()
    assert patching.apply() == files
    assert patching.apply() == 0
    assert {p: p.read_bytes() for p in copy.rglob("*.py")} == after
    patching.check()


def test_the_diffs_are_what_git_applies(copy: Path, tmp_path: Path) -> None:
    after = {p: p.read_bytes() for p in copy.rglob("*.py")}
    patching.revert()
    for patch in sorted(patching.PATCH_DIR.glob("*.patch")):
        subprocess.run(
            ["git", "apply", "--unidiff-zero", str(patch)],
            cwd=tmp_path,
            check=True,
            env={"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PATH": "/usr/bin:/bin"},
        )
    assert {p: p.read_bytes() for p in copy.rglob("*.py")} == after


def test_half_patched_is_refused_and_finished_by_apply(copy: Path) -> None:
    some_file = copy / patching.read_sums()[3].path
    patched = some_file.read_bytes()
    patching.revert()
    some_file.write_bytes(patched)
    with pytest.raises(RandKVPatchError, match="not completely"):
        patching.check()
    assert patching.apply() == len(patching.read_sums()) - 1
    patching.check()


@pytest.mark.parametrize("command", [patching.apply, patching.revert])
def test_other_content_is_refused_and_nothing_changes(copy: Path, command: object) -> None:
    touched = copy / patching.read_sums()[-1].path
    touched.write_text(touched.read_text() + "# edited\n")
    before = {p: p.read_bytes() for p in copy.rglob("*.py")}
    with pytest.raises(RandKVPatchError, match=r"expected .*force-reinstall"):
        command()  # type: ignore[operator]
    assert {p: p.read_bytes() for p in copy.rglob("*.py")} == before


def test_missing_stamp_is_refused(copy: Path) -> None:
    (copy / patching.STAMP_NAME).unlink()
    with pytest.raises(RandKVPatchError, match="no stamp"):
        patching.check()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.28.1")
    with pytest.raises(RandKVPatchError, match="is 0.28.1, the patch is for 0.28.0 only"):
        patching.find_vllm()


def test_every_patch_says_why_and_touches_each_file_once() -> None:
    touched = []
    added = 0
    for patch in patching.PATCH_DIR.glob("*.patch"):
        text = patch.read_text()
        for field in ("Subject", "Why no seam", "Touches", "Upstream", "Remove when", "Test"):
            assert re.search(rf"^{field}: \S", text, re.MULTILINE), (patch.name, field)
        tests = re.search(r"^Test: (.*)$", text, re.MULTILINE)
        assert tests
        for test in tests[1].split(", "):
            assert (Path(__file__).parents[2] / test).exists(), (patch.name, test)
        files = re.findall(r"^\+\+\+ b/vllm/(\S+)$", text, re.MULTILINE)
        touched += files
        added += len(re.findall(r"^\+(?!\+\+)", text, re.MULTILINE))
        assert not re.search(r"^ ", text[text.index("--- ") :], re.MULTILINE), "context lines"
    assert sorted(touched) == sorted(sums.path for sums in patching.read_sums())
    assert added < 200


def test_the_boundary_document_lists_every_touched_file() -> None:
    text = DOCUMENT.read_text()
    for sums in patching.read_sums():
        assert f"`vllm/{sums.path}`" in text
    assert patching.VLLM_COMMIT in text


def test_check_runs_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "randkv.patching", "check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert patching.digest() in done.stdout
