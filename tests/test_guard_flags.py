"""Flags as XLA parses them, and whether they live."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_recipe.guard.flags import (
    UNKNOWN,
    UNREADABLE,
    WITHOUT_EFFECT,
    format_flags,
    parse_flags,
    probe_flags,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("--a=1 --b=x,y", {"a": "1", "b": "x,y"}),
        ("  --a=1\n\t--a=2 ", {"a": "2"}),
        ("--a --b=", {"a": "true", "b": ""}),
        ("-a=1", {"a": "1"}),
        ("""--a="x y" --b='z "q"'""", {"a": "x y", "b": 'z "q"'}),
        (r'--a="x \" y"', {"a": 'x " y'}),
        ("--a=b=c", {"a": "b=c"}),
        ("--a=1 stray --b=2", {"a": "1"}),
    ],
)
def test_parsing(text: str, expected: dict[str, str]) -> None:
    assert parse_flags(text) == expected


def test_the_order_is_that_of_the_flag_that_counts() -> None:
    assert list(parse_flags("--a=1 --b=2 --a=3")) == ["b", "a"]


def test_a_file_of_flags(tmp_path) -> None:
    file = tmp_path / "flags"
    file.write_text("--a=1\n--b=2\n")
    assert parse_flags(str(file)) == {"a": "1", "b": "2"}
    assert parse_flags(str(tmp_path / "absent")) == {}


NAMES = st.text("abc_", min_size=1).map(lambda text: "xla" + text)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126))


@given(st.dictionaries(NAMES, VALUES))
def test_what_is_written_is_read_again(flags: dict[str, str]) -> None:
    assert parse_flags(format_flags(flags)) == flags


def test_the_probe_reads_what_jaxlib_says(tmp_path) -> None:
    """Lines as 0.11.2 prints them, from a stand-in for the interpreter."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        """#!/bin/sh
case "$XLA_FLAGS" in
  *bad*) echo 'F1201 1 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --bad=1 --worse'
         exit 1;;
  *odd*) echo "E1201 1 command_line_flags.cc:63] Couldn't interpret value x y for flag odd."
         exit 1;;
  '') echo 'IGNORED retired';;
esac
"""
    )
    stand_in.chmod(0o755)
    flags = {"good": "1", "bad": "1", "worse": "true", "odd": "x y", "retired": "1"}
    assert probe_flags(flags, {}, str(stand_in)) == {
        "bad": UNKNOWN,
        "worse": UNKNOWN,
        "odd": UNREADABLE,
        "retired": WITHOUT_EFFECT,
    }


def test_of_the_flags_that_old_jaxlib_lists_only_the_first_is_unknown(tmp_path) -> None:
    """0.4.34, met with ``--xla_bad=1 --xla_worse=1 --xla_fine=0``."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        """#!/bin/sh
say() { echo "F external/xla/xla/parse_flags_from_env.cc:224] Unknown flags in XLA_FLAGS: $1"
        exit 1; }
case "$XLA_FLAGS" in
  *bad*) say "--xla_bad=1  --xla_bad=1 --xla_fine=0";;
  *worse*) say "--xla_worse=1";;
esac
"""
    )
    stand_in.chmod(0o755)
    flags = {"xla_bad": "1", "xla_worse": "1", "xla_fine": "0"}
    assert probe_flags(flags, {}, str(stand_in)) == {"xla_bad": UNKNOWN, "xla_worse": UNKNOWN}


def test_a_value_that_old_jaxlib_cannot_read_is_found_by_halving(tmp_path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        """#!/bin/sh
case "$XLA_FLAGS" in
  *c=3*) echo "Check failed: tsl::Flags::Parse(...) Flag parsing failed."; exit 1;;
esac
"""
    )
    stand_in.chmod(0o755)
    flags = {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"}
    assert probe_flags(flags, {}, str(stand_in)) == {"c": UNREADABLE}


@pytest.mark.slow
def test_probing_finds_the_unknown_the_retired_and_the_misspelt() -> None:
    flags = {
        "xla_gpu_autotune_level": "0",
        "xla_gpu_enable_triton_gemm": "false",
        "xla_gpu_enable_command_buffer": "",
        "xla_disable_hlo_passes": "fusion",
        "xla_gpu_graph_level": "0",
        "xla_no_such_flag": "1",
        "xla_gpu_enable_cudnn_fmha": "true",
        "xla_gpu_enable_libnvptxcompiler": "true",
        "xla_gpu_force_compilation_parallelism": "many",
    }
    dead = probe_flags(flags)
    assert dead == {
        "xla_gpu_graph_level": WITHOUT_EFFECT,
        "xla_no_such_flag": WITHOUT_EFFECT,
        "xla_gpu_enable_cudnn_fmha": WITHOUT_EFFECT,
        "xla_gpu_enable_libnvptxcompiler": UNREADABLE,
        "xla_gpu_force_compilation_parallelism": UNREADABLE,
    }


def test_where_probing_cannot_run_nothing_is_called_dead() -> None:
    assert probe_flags({"xla_a": "1"}, python="/nonexistent/python") == {}
    assert probe_flags({}, python=sys.executable) == {}


@pytest.mark.slow
def test_every_flag_of_the_shipped_variants_lives() -> None:
    from mlm_recipe.guard.flags import merge_flags
    from mlm_recipe.guard.variants import load_variants

    flags: dict[str, str] = {}
    for spec in load_variants().specs.values():
        flags = merge_flags(flags, spec.variant.xla_flags)
    assert len(flags) == 13
    assert probe_flags(flags) == {}
