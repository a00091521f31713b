"""``python -m tsattn COMMAND``: a thin registry of commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import tsattn
from tsattn import tune
from tsattn.demo import cli as demo
from tsattn.evaluation import cli as evaluation

COMMANDS = {"demo": demo, "eval": evaluation, "tune": tune}
"""Name -> module with HELP, ``add_arguments(parser)`` and ``run(args) -> exit status``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments behind the program's name; default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tsattn", description="Query-aware page selection for long-context decoding."
    )
    parser.add_argument("--version", action="version", version=f"tsattn {tsattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=f"{module.HELP[0].upper()}{module.HELP[1:]}.")
        module.add_arguments(command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # the command's usage helps, not the program's
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = COMMANDS[args.command].run(args)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
