"""classify: captured logs of real deaths, and lines of kinds that no machine here can die of."""

from pathlib import Path

import pytest
import yaml

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.overlooked import overlooked
from mlm_recipe.guard.types import ChildExit, Failure

LOGS = Path(__file__).parent / "golden" / "logs"
CATALOGUE = load_catalogue()
VARIANTS = yaml.safe_load(
    (Path(__file__).parents[1] / "src/mlm_recipe/guard/variants.yaml").read_text()
)["variants"]
ABRT, SEGV, KILL = -6, -11, -9


def ended(log: str, returncode: int = 1, **kwargs) -> ChildExit:
    facts = {"phase": None, "seconds": 1.0} | kwargs
    return ChildExit(("x",), returncode, log_head=log[:32768], log_tail=log[-65536:], **facts)


def read(log: str, returncode: int = 1, **kwargs) -> Failure:
    return classify(ended(log, returncode, **kwargs), CATALOGUE, host=None)


# log, return code, kind, reason, phase, part of the signature, first remedy
GOLDEN = [
    ("levanter_727", ABRT, "compile_crash", "dynamic_slice_fusion", "compile_begin",
     "shape_tree.cc: result->children_start_id >= 0 (DynamicSliceFusion)",
     "no_dynamic_slice_fusion"),
    ("jax_25671", ABRT, "runtime_crash", "ordered_token", "budgeted",
     "pjrt_client.h: on_device_shape().has_layout() (ordered token)", None),
    ("ordered_token_poison", 1, "runtime_crash", "callback_state", "budgeted",
     "stale error of an ordered callback", None),
    ("cpu_reduce_window_crop_abort", ABRT, "compile_crash", "algsimp", "compile_begin",
     "algebraic_simplifier.cc: computation->Accept(this) is OK; hlo_computation.cc: ShapeUtil",
     "no_algsimp"),
    ("cpu_reduce_window_crop_abort_jax_0_4_37", ABRT, "compile_crash", "algsimp", "compile_begin",
     "algebraic_simplifier.cc: ", "no_algsimp"),
    ("cpu_conv_crop_segv", SEGV, "runtime_crash", "", "budgeted",
     "SIGSEGV in ExecuteReplicated.__call__", None),
    ("gpu_reducer_scan_segv", SEGV, "compile_crash", "", "compile_begin",
     "SIGSEGV in backend_compile_and_load", None),
    ("gpu_ffi_triton_target_segv", SEGV, "compile_crash", "", "compile_begin",
     "SIGSEGV in backend_compile_and_load", None),
    ("cpu_sort_comparator_abort", ABRT, "compile_crash", "nested_computation", "compile_begin",
     "map_util.h: it != collection.end() Map key not found", None),
    ("cpu_outfeed_reducer_exec_abort", ABRT, "runtime_crash", "reducer", "budgeted",
     "ynn_emitter.cc: reduce_instr->to_apply()->instruction_count() == 3", None),
    ("cpu_collective_mismatch_deadlock", ABRT, "timeout", "rendezvous", "budgeted",
     "timeout: rendezvous", None),
    ("flags_unknown", 1, "unknown_flag", "unknown", "jax_imported",
     "parse_flags_from_env.cc: unknown flag", "drop_unknown_flags"),
    ("flags_unknown_jax_0_4_37", ABRT, "unknown_flag", "unknown", "jax_imported",
     "parse_flags_from_env.cc: unknown flag", "drop_unknown_flags"),
    ("flag_value", 1, "unknown_flag", "bad_value", "jax_imported",
     "parse_flags_from_env.cc: value of a flag", "drop_unknown_flags"),
    ("compiler_options_unknown", 1, "unknown_flag", "unknown", "compile_begin",
     "compiler_options: no such option", "drop_unknown_flags"),
    ("compiler_options_unknown_jax_0_4_37", 1, "unknown_flag", "unknown", "compile_begin",
     "compiler_options: no such option", "drop_unknown_flags"),
    ("sharding_indivisible", 1, "config_error", "program", None, "IndivisibleError: ", None),
    ("cpu_ragged_all_to_all_unimplemented", 1, "unsupported_here", "unimplemented",
     "compile_begin", "JaxRuntimeError: UNIMPLEMENTED: HLO opcode", None),
    ("compile_bad_alloc", 1, "out_of_memory", "host", "compile_begin",
     "MemoryError: std::bad_alloc", "single_threaded_compile"),
    ("compile_pthread_create", ABRT, "out_of_memory", "host", "audited",
     "LLVM: pthread_create failed", "single_threaded_compile"),
    ("tpu_hbm_oom", 1, "out_of_memory", "device", "compile_begin",
     "RESOURCE_EXHAUSTED: Ran out of memory on HBM", "fsdp"),
    ("tpu_vmem", 1, "out_of_memory", "vmem", "compile_begin", "RESOURCE_EXHAUSTED: Allocation",
     "attention_plain"),
    ("breakpoint_no_tty", 1, "runtime_crash", "callback", "budgeted",
     "jax.debug.breakpoint without a terminal", None),
    ("gpu_callback_needs_backend", 1, "unsupported_here", "callback_without_device", "audited",
     "callback lowered without a device", None),
]  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case[0])
def test_captured_logs(case):
    name, returncode, kind, reason, phase, signature, remedy = case
    failure = read((LOGS / f"{name}.txt").read_text(), returncode)
    assert (failure.kind, failure.reason, failure.phase) == (kind, reason, phase)
    assert signature in failure.signature
    assert failure.remedies[:1] == ((remedy,) if remedy else ())
    assert failure.message and failure.advice


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case[0])
def test_the_phase_file_wins_over_frames(case):
    failure = read((LOGS / f"{case[0]}.txt").read_text(), case[1], phase="compile_begin")
    assert failure.phase == "compile_begin"


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("cpu_constant_fold_hang", "constant_folding", "no_constant_folding"),
        ("cpu_unrolled_slow_compile", "slow_compile", "scanned_layers"),
    ],
)
def test_captured_hangs(name, reason, remedy):
    failure = read((LOGS / f"{name}.txt").read_text(), ABRT, timed_out=True)
    assert (failure.kind, failure.reason) == ("timeout", reason)
    assert failure.phase == "compile_begin"
    assert failure.remedies[0] == remedy
    assert "backend_compile_and_load" in failure.message


def test_flags_are_named():
    assert read((LOGS / "flags_unknown.txt").read_text()).flags == ("xla_no_such_flag",)
    assert read((LOGS / "flag_value.txt").read_text()).flags == ("xla_gpu_autotune_level",)
    option = read((LOGS / "compiler_options_unknown.txt").read_text())
    assert option.flags == ("xla_cpu_no_such_option",)
    several = "F1201 11:47:57.75  18564 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: "
    assert read(f"{several}--xla_a=1 --xla_b --xla_c='x y'").flags[:2] == ("xla_a", "xla_b")
    libtpu = "ERROR: Unknown command line flag 'xla_tpu_nope'"
    assert read(libtpu).flags == ("xla_tpu_nope",)
    value = "While setting option xla_gpu_x, 'allreduce' is not a valid enum value."
    enum = raised(XLA, f"INVALID_ARGUMENT: {value}")
    assert read(enum).flags == ("xla_gpu_x",)
    assert read(enum).kind == "unknown_flag"


@pytest.mark.parametrize(
    "name", [e.name for e in CATALOGUE.entries if "callback" in e.reason or e.kind == "timeout"]
)
def test_where_no_flag_helps_the_ladder_stops_or_a_remedy_is_named(name):
    entry = next(e for e in CATALOGUE.entries if e.name == name)
    assert entry.remedies or not entry.ladder


def test_silent_overflow_is_seen_in_a_success():
    failure = overlooked(ended((LOGS / "gpu_silent_hbm_overflow.txt").read_text(), 0))
    assert failure is not None
    assert (failure.kind, failure.reason) == ("out_of_memory", "device")
    assert overlooked(ended("STAGE compiled\n", 0)) is None
    line = "E1201 1:2:3 1 gpu_hlo_schedule.cc:1] The byte size of input/output arguments (130) "
    assert overlooked(ended(line + "exceeds the base limit (121).", 0)) is None


def raised(kind: str, message: str, *functions: str) -> str:
    frames = [
        f'  File "/v/jax/_src/{place.partition(":")[0]}", line 3, in {place.partition(":")[2]}\n'
        for place in functions
    ]
    return f"Traceback (most recent call last):\n{''.join(frames)}{kind}: {message}\n"


def fatal(source: str, message: str) -> str:
    line = f"F0000 00:00:1796125476.8  123 {source}:54] {message}"
    return f"{line}\n*** Check failure stack trace: ***\n"


COMPILING = ("stages.py:compile", "compiler.py:backend_compile_and_load")
RUNNING = ("pjit.py:cache_miss", "interpreters/pxla.py:__call__")
XLA = "jax.errors.JaxRuntimeError"

# What it says, return code, kind, name, first remedy
SAID = [
    (fatal("gpu_hlo_schedule.cc", "Check failed: overlap_limit > 0 (0 vs. 0)"), ABRT,
     "compile_crash", "latency_hiding", "no_latency_hiding"),
    (fatal("hlo_sharding.cc", "Check failed: !IsManual()"), ABRT, "compile_crash",
     "ordered_manual_sharding", "auto_mesh_axes"),
    (fatal("hlo_instruction.h", "Check failed: has_sharding()"), ABRT, "compile_crash",
     "lost_sharding", "pure_data_parallel"),
    (fatal("triton_fusion_emitter.cc", "Check failed: x.ok()"), ABRT, "compile_crash",
     "triton_gemm", "autotune_cublas_only"),
    (fatal("layout_assignment.cc", "Check failed: IsCublasLtGemm(*x)"), ABRT, "compile_crash",
     "gpu_emitters", "disable_last_pass"),
    (raised(XLA, "INTERNAL: Autotuning failed for HLO: %fusion", *COMPILING), 1, "compile_error",
     "no_algorithm", "no_autotune"),
    (raised(XLA, "NOT_FOUND: No valid config found!", *COMPILING), 1, "compile_error",
     "no_algorithm", "no_autotune"),
    (raised(XLA, "INTERNAL: ptxas exited with non-zero error code 65280", *COMPILING), 1,
     "compile_error", "ptxas", "autotune_cublas_only"),
    (raised(XLA, "INTERNAL: No PTX compilation provider is available", *COMPILING), 1,
     "environment", "ptx_unavailable", None),
    (raised(XLA, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 88.2GiB.", *RUNNING),
     1, "out_of_memory", "device_memory", "fsdp"),
    (raised("jaxlib.xla_extension.XlaRuntimeError", "RESOURCE_EXHAUSTED: Failed to allocate "
            "request for 1.20GiB (1288490188B) on device ordinal 0"), 1, "out_of_memory",
     "device_memory", "fsdp"),
    (raised(XLA, "INTERNAL: cuMemAllocAsync failed to allocate 1024 bytes"), 1, "out_of_memory",
     "collective_memory", "lower_gpu_memory_fraction"),
    (raised(XLA, "RESOURCE_EXHAUSTED: redzone allocator: out of memory", *COMPILING), 1,
     "out_of_memory", "autotuner_memory", "lower_gpu_memory_fraction"),
    (raised(XLA, "RESOURCE_EXHAUSTED: Out of memory allocating 8796093022208 bytes."), 1,
     "out_of_memory", "host_array", "full_remat"),
    (raised("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 8.00 TiB for an "
            "array with shape (9,)"), 1, "out_of_memory", "host_memory",
     "single_threaded_compile"),
    ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
     ABRT, "out_of_memory", "host_memory", "single_threaded_compile"),
    ("LLVM ERROR: out of memory\nAllocation failed\n", ABRT, "out_of_memory", "host_memory",
     "single_threaded_compile"),
    (raised(XLA, "INTERNAL: Command buffer has to have a graph executable", *RUNNING), 1,
     "runtime_crash", "command_buffer", "command_buffers_without_collectives"),
    (raised("ValueError", "No valid engine configs for Matmul_MUL_"), 1, "compile_error",
     "cudnn_engine", "attention_plain"),
    (raised(XLA, "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), 1,
     "infrastructure", "sticky_device", "no_command_buffers"),
    (raised(XLA, "INTERNAL: NCCL operation ncclAllReduce failed: unhandled cuda error"), 1,
     "infrastructure", "nccl", "no_sync_collectives"),
    (raised("ValueError", "The following ordered effects are not supported for more than 1 "
            "device: [Debug]"), 1, "config_error", "ordered_effects", None),
    (raised(XLA, "INVALID_ARGUMENT: 'sdy.all_reduce' op overlaps", *COMPILING), 1,
     "compile_error", "shardy", "pure_data_parallel"),
    (raised(XLA, "INTERNAL: MLIR pass pipeline: 'scf.if' op region", *COMPILING), 1,
     "compile_error", "mlir_pipeline", "disable_last_pass"),
    (raised(XLA, "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: "
            "gemm_fusion_autotuning_results_1", *COMPILING), 1, "timeout",
     "autotuning_across_hosts", "no_shard_autotuning"),
    (raised(XLA, "UNAVAILABLE: heartbeat of task 3 missed"), 1, "infrastructure", "coordination",
     None),
    (fatal("hang_watchdog.cc", "HangWatchdog: std::bad_alloc"), ABRT, "runtime_crash",
     "hang_watchdog", "no_progress_tracking"),
    (raised("RuntimeError", "Loss is NaN"), 1, "numeric_mismatch", "nan_loss", None),
    (raised("OSError", "[Errno 28] No space left on device"), 1, "environment", "disk_full", None),
]  # fmt: skip


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case[3]}-{case[2]}")
def test_what_the_catalogue_knows(case):
    text, returncode, kind, name, remedy = case
    failure = read(text, returncode)
    assert (failure.kind, failure.name) == (kind, name)
    assert failure.remedies[:1] == ((remedy,) if remedy else ())


# What it says, return code, phase, kind
GENERIC = [
    (fatal("some_pass.cc", "Check failed: a == b (1 vs. 2)"), ABRT, None, "compile_crash"),
    (fatal("some_thunk.cc", "Check failed: a == b (1 vs. 2)"), ABRT, None, "runtime_crash"),
    (fatal("some_pass.cc", "Check failed: a == b (1 vs. 2)"), ABRT, "budgeted", "runtime_crash"),
    ("", SEGV, "compile_begin", "compile_crash"),
    ("", SEGV, "budgeted", "runtime_crash"),
    ("", SEGV, "backend_ready", "unknown"),
    ("", SEGV, None, "unknown"),
    ("", 139, "compile_begin", "compile_crash"),
    ("", -4, None, "environment"),
    (raised(XLA, "INTERNAL: something new", *COMPILING), 1, None, "compile_error"),
    (raised(XLA, "INTERNAL: something new", *RUNNING), 1, None, "runtime_crash"),
    (raised(XLA, "UNIMPLEMENTED: this op", *RUNNING), 1, None, "unsupported_here"),
    (raised("RuntimeError", "something new"), 1, "compile_begin", "compile_error"),
    (raised("RuntimeError", "something new"), 1, None, "unknown"),
    (raised("TypeError", "unsupported operand"), 1, None, "config_error"),
    (raised("jax.errors.TracerBoolConversionError", "Attempted"), 1, None, "config_error"),
    (raised("ModuleNotFoundError", "No module named 'x'"), 1, None, "environment"),
    (raised("FileNotFoundError", "[Errno 2] no"), 1, None, "config_error"),
    (raised("ConnectionResetError", "[Errno 104] reset"), 1, None, "infrastructure"),
    (raised("RuntimeError", "Unknown backend: 'gpu' requested, but no platforms that are "
            "instances of gpu are present."), 1, None, "environment"),
    ("", 124, None, "timeout"),
    ("", 125, None, "infrastructure"),
    ("", 127, None, "config_error"),
    ("usage: x", 2, None, "config_error"),
    ("", -2, None, "infrastructure"),
    ("", -15, None, "infrastructure"),
    (raised("KeyboardInterrupt", ""), 130, None, "infrastructure"),
    ("nothing", 1, None, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize("case", GENERIC)
def test_what_the_catalogue_does_not_know(case):
    text, returncode, phase, kind = case
    failure = read(text, returncode, phase=phase)
    assert failure.kind == kind
    assert failure.name == "" and failure.advice


def test_the_last_words_decide_not_the_chatter():
    survived = raised(XLA, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1GiB")
    chatter = "W1201 1:2:3 1 rendezvous.cc:116] This thread may be stuck\n"
    failure = read(survived + chatter + raised("TypeError", "no"))
    assert failure.kind == "config_error"
    assert failure.signature == "TypeError: no"
    failure = read(chatter + fatal("some_pass.cc", "Check failed: a"), ABRT)
    assert failure.kind == "compile_crash"
    ignored = "Exception ignored in atexit callback <function x>:\n" + survived
    assert read(raised("KeyError", "'a'") + ignored).signature == "KeyError: 'a'"
    cause = survived + "\nThe above exception was the direct cause of the following exception:\n\n"
    assert read(cause + raised("RuntimeError", "training failed")).kind == "out_of_memory"


def test_a_decisive_line_in_the_middle_of_a_long_log(tmp_path):
    noise = "x" * 80 + "\n"
    log = noise * 2000 + fatal("shape_tree.cc", "Check failed: a.children_start_id >= 0 (-1 vs. 0)")
    log += noise * 2000
    (tmp_path / "log").write_text(log)
    failure = read(log, ABRT, log_path=str(tmp_path / "log"))
    assert failure.name == "dynamic_slice_fusion"
    assert failure.signature == "shape_tree.cc: a.children_start_id >= 0 (DynamicSliceFusion)"


def test_signatures_do_not_depend_on_the_run():
    one = read(fatal("a.cc", "Check failed: p != 0x7fff12 (5 vs. 6) 123"), ABRT)
    two = read(fatal("a.cc", "Check failed: p != 0x1234ab (7 vs. 8) 456"), ABRT)
    assert one.signature == two.signature == "a.cc: p != N"
    first = read(raised(XLA, "INTERNAL: at /tmp/a/x.py got 12.5GiB"))
    second = read(raised(XLA, "INTERNAL: at /home/b/x.py got 3.25GiB"))
    assert first.signature == second.signature == "JaxRuntimeError: INTERNAL: at x.py got N"


def test_the_last_pass_is_found_and_can_decide():
    crumbs = "I1201 1:2:3 1 hlo_pass_pipeline.cc:211]   HLO pass algsimp\n"
    crumbs += "I1201 1:2:3 1 hlo_pass_pipeline.cc:206] HLO pass: algsimp time: 7 us\n"
    crumbs += "I1201 1:2:3 1 hlo_pass_pipeline.cc:99] Running HLO pass pipeline on module x: y\n"
    assert read(crumbs, SEGV).last_pass == "algsimp"
    crumbs += "I1201 1:2:3 1 hlo_pass_pipeline.cc:211]   HLO pass latency-hiding-scheduler\n"
    failure = read(crumbs, SEGV, phase="compile_begin")
    assert failure.name == "latency_hiding_pass"
    assert failure.remedies[0] == "no_latency_hiding"


def test_sigkill_is_host_memory_only_where_something_says_so():
    host = HostFacts(memory_bytes=100, oom_kills=None)
    killed = ended("", KILL, peak_rss=61)
    assert classify(killed, CATALOGUE, host=host).kind == "out_of_memory"
    small = ended("", KILL, peak_rss=59)
    failure = classify(small, CATALOGUE, host=host)
    assert (failure.kind, failure.reason) == ("infrastructure", "killed from outside")
    assert classify(killed, CATALOGUE, host=None).kind == "infrastructure"
    assert read("", 137).kind == "infrastructure"


def test_the_kernel_counter_decides(monkeypatch):
    monkeypatch.setattr(HostFacts, "now", classmethod(lambda cls: HostFacts(100, 8)))
    assert classify(ended("", KILL), CATALOGUE, host=HostFacts(100, 7)).reason == "host"
    assert classify(ended("", KILL), CATALOGUE, host=HostFacts(100, 8)).kind == "infrastructure"


def test_what_the_supervisor_did_comes_first():
    text = raised("TypeError", "no")
    assert read(text, KILL, over_memory=True).reason == "host"
    failure = read(text, -15, timed_out=True)
    assert (failure.kind, failure.reason) == ("timeout", "stall")
    stuck = "E1201 1:2:3 1 rendezvous.cc:116] [id=0] This thread has waited and may be stuck"
    assert read(stuck, -15, timed_out=True).reason == "rendezvous"


def test_every_remedy_is_a_variant_and_names_are_unique():
    named = {remedy for entry in CATALOGUE.entries for remedy in entry.remedies}
    assert named <= set(VARIANTS)
    assert len(set(CATALOGUE.names())) == len(CATALOGUE.entries) >= 50
    rows = {entry.id for entry in CATALOGUE.entries} - {""}
    # C23 kills nothing: it is an audit.
    assert rows == {f"C{n:02d}" for n in range(1, 32)} - {"C23"}
    assert all("/" in ref and "#" in ref for entry in CATALOGUE.entries for ref in entry.refs)


def test_users_entries_come_first(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "entries:\n- {name: mine, kind: compile_error, patterns: ['shape_(?P<what>\\w+)'],"
        " signature: 'mine {what} {phase}', advice: do this, remedies: [fsdp]}\n"
    )
    catalogue = load_catalogue(path)
    text = (LOGS / "levanter_727.txt").read_text()
    failure = classify(ended(text, ABRT), catalogue, host=None)
    assert (failure.name, failure.signature) == ("mine", "mine tree compile_begin")
    assert len(catalogue.entries) == len(CATALOGUE.entries) + 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("entries: [", ["is not YAML"]),
        ("- a", ["has no list of entries"]),
        ("entries: [3]", ["entry 1", "is no mapping"]),
        ("entries: [{name: a, kind: unknown}]", ["entry 1", "advice", "is missing"]),
        ("entries: [{name: a, kind: sad, advice: b}]", ["'sad'", "is no kind", "compile_crash"]),
        ("entries: [{name: a, kind: unknown, advice: b, patern: c}]", ["'patern'", "no field"]),
        ("entries: [{name: a, kind: unknown, advice: b, patterns: ['(']}]", ["no regular expr"]),
        ("entries: [{name: a, kind: unknown, advice: b, patterns: 'x'}]", ["is no list of texts"]),
        ("entries: [{name: a, kind: unknown, advice: b, ladder: 1}]", ["ladder", "neither"]),
        ("entries: [{name: a, kind: unknown, advice: b, scope: all}]", ["is no scope"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_catalogue(tmp_path / "mine.yaml")
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_catalogue(tmp_path / "absent.yaml")


@pytest.mark.parametrize("fault", ["", "Fatal Python error: Aborted\n\n"])
def test_an_exception_that_was_handled_is_not_why_a_signal_came(fault):
    log = (
        "ERROR:root:going on\nTraceback (most recent call last):\n"
        '  File "x.py", line 2, in <module>\n'
        "ModuleNotFoundError: No module named 'optional'\n"
    )
    found = read(log + fault, ABRT)
    assert found.signature == "SIGABRT" and found.ladder
    assert read(log, 1).kind == "environment"
