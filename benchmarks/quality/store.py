# SPDX-License-Identifier: Apache-2.0
"""A run's directory: ``settings.json``, and ``records.jsonl`` with one record a line. Pure."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from benchmarks.quality.record import Record, Settings
from benchmarks.validation import reasons


class StoreError(Exception):
    """The directory holds another run, or something that is none."""


class Store:
    """Appends records as they come; what is there already need not be run again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._settings = directory / "settings.json"
        self._records = directory / "records.jsonl"

    def begin(self, settings: Settings) -> None:
        """Create the directory, or go on in it when it holds a run with the same settings.

        What either does not record is not compared. Drops a last line that was cut off.

        Raises:
            StoreError: It holds a run with other settings; names each.
        """
        if self._settings.exists():
            stored, asked = self.settings().model_dump(), settings.model_dump()
            different = [
                f"{name} is {stored[name]!r} there and {asked[name]!r} here"
                for name in asked
                if stored[name] != asked[name] and None not in (stored[name], asked[name])
            ]
            if different:
                raise StoreError(
                    f"{self.directory} holds a run with other settings: {'; '.join(different)}. "
                    "Give the same settings to go on, or another --output."
                )
        elif self.directory.exists() and any(self.directory.iterdir()):
            raise StoreError(
                f"{self.directory} is not empty and holds no settings.json. Give another --output."
            )
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            part = self._settings.with_suffix(".part")
            part.write_text(settings.model_dump_json(indent=2) + "\n")
            part.replace(self._settings)
        if self._records.exists():
            with self._records.open("rb+") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)

    def settings(self) -> Settings:
        """Raises StoreError where there are none, or none of this version."""
        try:
            return Settings.model_validate_json(self._settings.read_bytes())
        except OSError as error:
            raise StoreError(f"{self.directory} holds no run: {error}") from None
        except ValidationError as error:
            raise StoreError(f"{self._settings}: {reasons(error)}") from None

    def append(self, record: Record) -> None:
        with self._records.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Record]:
        """Every record, in the order written; a last line that was cut off does not count.

        Raises:
            StoreError: A line that is no record, or the result of an arm that did not evict; or
                the same (arm, item) twice.
        """
        if not self._records.exists():
            return []
        found: dict[tuple[str, str], Record] = {}
        lines = self._records.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                record = Record.model_validate_json(line)
            except ValidationError as error:
                raise StoreError(f"{self._records}, line {number}: {reasons(error)}") from None
            name = (record.arm.name, record.key)
            if name in found:
                raise StoreError(f"{self._records}, line {number}: {name} is there twice")
            found[name] = record
        return list(found.values())
