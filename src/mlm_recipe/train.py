"""The launcher: ``python -m mlm_recipe.train --config config/roberta_tiny.yaml``.

It imports no jax, so that no compiler can kill it. It reads the YAML, lays the command line on it,
answers what can be answered without a device, writes the effective configuration into the run
directory, has the guard prove the train step, and watches over the training program, which reads
that file only.
"""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.targets import targets_text
from mlm_recipe.launch.checks import check_config
from mlm_recipe.launch.help import help_text
from mlm_recipe.launch.launch import Launch
from mlm_recipe.launch.options import Options, check_options, parse_options
from mlm_recipe.launch.overlay import (
    Config,
    get_path,
    load_yaml,
    parse_overrides,
    set_path,
    write_yaml,
)
from mlm_recipe.launch.schema import load_schema

EXIT_CONFIG_ERROR = 2
EXIT_INTERRUPTED = 130

# Trackers that write files: the key of the place, and the place in the run directory.
_TRACKER_PATHS = {"tensorboard": ("logdir", "tensorboard"), "json_file": ("output_path", ".")}


def effective_config(options: Options) -> Config:
    """File, then command line, then what the run directory decides; checked.

    Raises:
        ConfigError: see `check_config`.
    """
    if options.config is None:
        raise ConfigError(
            "--config", None, "no configuration given", "add --config config/roberta_tiny.yaml"
        )
    schema = load_schema()
    config = load_yaml(options.config)
    for path, value in parse_overrides(options.overrides):
        set_path(config, path, schema.coerce(path, value, config))
    schema.validate(config)
    _name_the_run(config, options.config)
    check_config(config, schema)
    return config


def _name_the_run(config: Config, source: Path) -> None:
    """Give the run an id and put everything it writes below its directory."""
    run_id = get_path(config, "trainer.id") or os.environ.get("RUN_ID")
    run_id = str(run_id or f"{source.stem}-{secrets.token_hex(3)}")
    set_path(config, "trainer.id", run_id)
    run_dir = run_directory(config)
    if get_path(config, "trainer.log_dir") is None:
        set_path(config, "trainer.log_dir", str(run_dir / "logs"))
    if get_path(config, "trainer.checkpointer.base_path") is None:
        set_path(config, "trainer.checkpointer.base_path", str(run_dir / "checkpoints"))
        set_path(config, "trainer.checkpointer.append_run_id_to_base_path", False)
    if get_path(config, "trainer.jax_compilation_cache_dir") is None:
        cache = get_path(
            config, "guard.cache_dir", load_schema().defaults("GuardConfig")["cache_dir"]
        )
        set_path(config, "trainer.jax_compilation_cache_dir", str(Path(str(cache)) / "xla"))
    trackers = get_path(config, "trainer.tracker", [])
    for tracker in trackers if isinstance(trackers, list) else [trackers]:
        if isinstance(tracker, dict) and tracker.get("type") in _TRACKER_PATHS:
            key, name = _TRACKER_PATHS[tracker["type"]]
            tracker.setdefault(key, str(run_dir / name))


def run_directory(config: Config) -> Path:
    """``output_dir/<trainer.id>``."""
    output_dir = config.get("output_dir") or load_schema().default("output_dir")
    return Path(str(output_dir)) / str(get_path(config, "trainer.id"))


def write_effective_config(config: Config) -> Path:
    """Write ``config.yaml`` into the run directory.

    Raises:
        ConfigError: the directory cannot be written.
    """
    run_dir = run_directory(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_yaml(config, run_dir / "config.yaml")
    except OSError as error:
        raise ConfigError(
            "output_dir",
            str(run_dir.parent),
            f"cannot write the run directory: {error.strerror}",
            "choose a writable one: --output_dir DIR",
        ) from error
    return run_dir / "config.yaml"


def main(arguments: Sequence[str]) -> int:
    """Returns the training program's exit code, or the guard's (``guard.exits``)."""
    try:
        options = parse_options(arguments)
        if options.help is not None:
            sys.stdout.write(help_text(load_schema(), options.help))
            return 0
        if options.list_targets:
            sys.stdout.write(targets_text())
            return 0
        config = effective_config(options)
        check_options(options, config)
        config_file = write_effective_config(config)
        sys.stdout.write(f"run {get_path(config, 'trainer.id')}: {config_file.parent}\n")
        sys.stdout.flush()
        return Launch(config, config_file, options).run()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
