# SPDX-License-Identifier: Apache-2.0
"""``docs/licences.md`` lists exactly what is pinned, and copyleft does not slip in."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.deploy.manifests import REPOSITORY


@pytest.fixture(scope="module")
def licences() -> Iterator[ModuleType]:
    """The program, which is in no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "deploy")
        yield importlib.import_module("licences")


def test_the_page_is_up_to_date(licences: ModuleType) -> None:
    assert licences.differences(licences.PAGE.read_text(encoding="utf-8")) == []


def test_a_new_pin_is_missed_on_the_page(licences: ModuleType) -> None:
    text = licences.PAGE.read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| uvloop | "))
    older = text.replace(row, row.replace("| uvloop | ", "| uvloop | 0."))
    without = text.replace(row + "\n", "")
    for stale, messages in ((older, 2), (without, 1)):
        found = licences.differences(stale)
        assert len(found) == messages, found
        assert all("uvloop" in line for line in found)


@pytest.mark.parametrize(
    ("licence", "refused"),
    [
        ("MIT", False),
        ("Apache-2.0 OR BSD-3-Clause", False),
        ("GPL-3.0-only", True),
        ("GNU General Public License v3 (GPLv3)", True),
        ("AGPL-3.0-or-later", True),
        ("GNU Lesser General Public License v2 (LGPLv2)", True),
        ("MPL-2.0", True),
        ("Other/Proprietary License", True),
        ("not stated", True),
    ],
)
def test_what_is_not_permissive_needs_a_note(
    licences: ModuleType, licence: str, refused: bool
) -> None:
    package = licences.Package("some-package", "1.0", licence, "cpu")
    assert bool(licences.refusals([package])) is refused


def test_the_gpl_is_named_in_the_note(
    licences: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = licences.Package("some-package", "1.0", "GPL-3.0-only", "cpu")
    for note, refused in (("it is handy", True), ("GPL-3.0; a program of its own", False)):
        monkeypatch.setitem(licences.NOTES, "some-package", note)
        assert bool(licences.refusals([package])) is refused
