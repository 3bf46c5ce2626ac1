"""Run any command under the guard: deadlines, a memory ceiling, and a diagnosis when it dies.

    python -m mlm_recipe.guard --timeout 600 --memory-gib 16 --json death.json -- python train.py

The command's output appears as it comes. When the command fails, a short verdict follows on
stderr: what kind of death it was, its signature, where it happened, what is known to help, and
public issues about it. Nothing that the command started is left behind, whatever happens.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.catalogue import Catalogue, load_catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.entry import prove_entry
from mlm_recipe.guard.exits import ExitCode
from mlm_recipe.guard.overlooked import overlooked
from mlm_recipe.guard.record import failure_record, signal_name, write_record
from mlm_recipe.guard.supervise import Limits, supervise
from mlm_recipe.guard.types import ChildExit, Failure

EXIT_USAGE = 2
EXIT_DEADLINE = 124
EXIT_CEILING = 137
_EXIT_CODES = """\
exit codes:
  the command's own when it ended by itself, 128 + N when signal N ended it;
  124 when the deadline ended it, 137 when the memory ceiling did, 2 for bad usage;
  21 when the command ended well, but its log shows a program that cannot fit its device.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        catalogue = load_catalogue(options.catalogue)
    except ConfigError as error:
        _say(f"guard: {error}")
        return EXIT_USAGE
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        if options.entry is not None:
            return prove_entry(
                options.entry,
                target=options.target,
                directory=options.directory,
                report_file=options.json,
                catalogue=options.catalogue,
            )
        return _run(options, catalogue)
    except (OSError, ConfigError) as error:
        _say(f"guard: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        _say(f"guard: {signal_name(number)}: the command is ended")
        return 128 + number


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Everything behind the first ``--`` is the command, untouched."""
    own, command = argv, []
    if "--" in argv:
        cut = argv.index("--")
        own, command = argv[:cut], argv[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(own)
    if options.entry is None and not command:
        parser.error("give a command behind --, e.g. -- python train.py; or --entry")
    options.command = command
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlm_recipe.guard",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT...]\n"
        "       %(prog)s --entry pkg.mod:build [--target KIND] [--json FILE]",
        description=__doc__,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--timeout", type=_positive, metavar="S", help="end it after S seconds; default: never"
    )
    parser.add_argument(
        "--memory-gib",
        type=_positive,
        metavar="G",
        help="end it when all its processes together hold more than G GiB (Linux); default: never",
    )
    parser.add_argument(
        "--grace",
        type=_positive,
        default=10.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL; default: %(default)s",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the failure record, or for a success the same with kind null",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="keep the command's output; default: a temporary"
    )
    parser.add_argument(
        "--catalogue",
        type=Path,
        metavar="FILE",
        help="YAML with further known deaths, tried before the shipped ones",
    )
    entry = parser.add_argument_group(
        "prove a jax program in children, with fallbacks, instead of running a command"
    )
    entry.add_argument("--entry", metavar="ENTRY", help="pkg.mod:build or path/file.py:build")
    entry.add_argument(
        "--target",
        default="auto",
        metavar="KIND",
        help="the attached devices (auto), or what is not there, e.g. h200:8",
    )
    entry.add_argument("--directory", type=Path, help="where children leave their files")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _run(options: argparse.Namespace, catalogue: Catalogue) -> int:
    with tempfile.TemporaryDirectory(prefix="guard-") as scratch:
        log_path = options.log or Path(scratch) / "log.txt"
        limits = Limits(
            seconds=options.timeout,
            memory_bytes=int(options.memory_gib * 2**30) if options.memory_gib else None,
            grace_seconds=options.grace,
        )
        _check_files(options.log, options.json)
        log_path.write_bytes(b"")
        host = HostFacts.now()
        with _Echo(log_path):
            exit = supervise(options.command, env=os.environ, log_path=log_path, limits=limits)
        failed = exit.returncode != 0 or exit.timed_out or exit.over_memory
        failure = classify(exit, catalogue, host=host) if failed else overlooked(exit)
        record = failure_record(exit, failure)
        if options.log is None:
            record["log_path"] = None
        if options.json is not None:
            write_record(options.json, record)
    if failure is not None:
        _say(_verdict(exit, failure))
    return _exit_code(exit, failure)


def _check_files(log: Path | None, record: Path | None) -> None:
    """Before the command runs; an older record goes, lest it is read as this run's."""
    if log is not None and record is not None and log.resolve() == record.resolve():
        raise ConfigError("--json", str(record), "--log names the same file", "name another")
    for option, path in (("--log", log), ("--json", record)):
        if path is None:
            continue
        try:
            if path.exists() and not path.is_file():  # a directory or a device: never replaced
                raise OSError(0, "not a regular file")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                option,
                str(path),
                f"it cannot be written ({error.strerror})",
                "name a file in a directory that can be written",
            ) from error
    if record is not None:
        record.unlink()


def _exit_code(exit: ChildExit, failure: Failure | None) -> int:
    if exit.over_memory:
        return EXIT_CEILING
    if exit.timed_out:
        return EXIT_DEADLINE
    if exit.returncode == 0 and failure is not None:
        return ExitCode.NONE_FITS
    return 128 - exit.returncode if exit.returncode < 0 else exit.returncode


def _verdict(exit: ChildExit, failure: Failure) -> str:
    """A few lines for people."""
    ended = signal_name(exit.signal) or f"exit code {exit.returncode}"
    if exit.timed_out or exit.over_memory:
        ended = "ended by the guard: " + ("deadline" if exit.timed_out else "memory ceiling")
    kind = f"{failure.kind} ({failure.reason})" if failure.reason else failure.kind
    lines = [
        f"guard: {kind}, {ended}, after {exit.seconds:.1f} s",
        f"  signature  {failure.signature}",
        f"  phase      {failure.phase or 'unknown'}",
        f"  message    {failure.message}",
    ]
    if failure.flags:
        lines.append(f"  flags      {' '.join(failure.flags)}")
    if failure.last_pass:
        lines.append(f"  last pass  {failure.last_pass}")
    lines.append(f"  advice     {failure.advice}")
    if failure.remedies:
        lines.append(f"  try        {', '.join(failure.remedies)}")
    if failure.refs:
        lines.append(f"  see        {', '.join(failure.refs)}")
    return "\n".join(lines)


class _Echo:
    """Copies a growing file to stdout from a thread."""

    def __init__(self, path: Path):
        self._path, self._done = path, threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> "_Echo":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _copy(self) -> None:
        with self._path.open("rb") as file:
            while True:
                last = self._done.is_set()  # before reading: nothing is written after it
                while chunk := file.read(65536):
                    try:
                        sys.stdout.buffer.write(chunk)
                        sys.stdout.buffer.flush()
                    except (BrokenPipeError, ValueError):
                        return
                if last:
                    return
                self._done.wait(0.1)


if __name__ == "__main__":
    sys.exit(main())
