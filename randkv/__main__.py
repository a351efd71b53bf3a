# SPDX-License-Identifier: Apache-2.0
"""Answers about the policy that need no engine."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from randkv import retention_command
from randkv.advice import command as advise_command
from randkv.errors import RandKVError, RandKVUnsupportedError

_COMMANDS = {"retention": retention_command, "advise": advise_command}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m randkv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        one = commands.add_parser(name, help=command.ABOUT, description=command.ABOUT)
        one.set_defaults(run=command.run)
        command.add_options(one)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except RandKVUnsupportedError as error:
        sys.stderr.write(f"error: the policy cannot run with this: {'; '.join(error.reasons)}\n")
        return 2
    except (RandKVError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
