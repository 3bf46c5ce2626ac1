"""Python frames in a log, from tracebacks and from faulthandler, and the phase that they tell."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlm_recipe.guard.status import Phase

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line \d+,? in (?P<function>.+?)\s*$')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")

# Where in jax, of 0.4.34 to 0.11.2, a function is at home: innermost frame first, the first wins.
_COMPILE = re.compile(
    r"compiler\.py:(backend_compile\w*|compile_or_get_cached|_compile_and_\w+)"
    r"|pxla\.py:(_cached_compilation|from_hlo|compile)"
    r"|stages\.py:compile|compilation_cache\.py:\w+"
)
_LOWER = re.compile(
    r"mlir\.py:\w+|pxla\.py:(lower_\w+|_cached_lowering_to_hlo)"
    r"|pjit\.py:(_pjit_lower\w*|_resolve_and_lower|lower|jit_lower)|stages\.py:lower"
    r"|\w+\.py:(\w+_lowering\w*|emit_python_callback|_?lower_\w+)"
)
_TRACE = re.compile(
    r"partial_eval\.py:(trace_\w+|process_\w+)|api\.py:(trace|eval_shape|make_jaxpr)"
    r"|pjit\.py:(_create_pjit_jaxpr|_infer_params\w*|infer_params\w*|_trace_for_jit|jit_trace|trace)"
)
_RUN = re.compile(
    r"pxla\.py:(__call__|call|cache_miss|aot_cache_miss|_handle_token_bufs|shard_args)"
    r"|stages\.py:(call|__call__|cpp_call_fallback)|callback\.py:\w+|debugging\.py:\w+callback\w*"
    r"|pjit\.py:(_pjit_call_impl\w*|call_impl_cache_miss|_python_pjit_helper|cache_miss"
    r"|_run_python_pjit)"
    r"|api\.py:(block_until_ready|try_to_block|device_get|_device_get|effects_barrier|clean_up)"
    r"|array\.py:(_value|__array__|block_until_ready|_single_device_array_to_np_array_did_copy|tolist"
    r"|__float__|__format__|__repr__|__str__|item|_token_shard_arg|is_ready|copy_to_host_async)"
    r"|dispatch\.py:(wait_for_tokens|block_until_ready|apply_primitive|_device_put\w*"
    r"|get_token_input)|core\.py:block_until_ready"
)
_BACKEND = re.compile(
    r"xla_bridge\.py:(backends|_init_backend|_discover_and_register\w*|_?make_\w+)"
    r"|xla_client\.py:make_\w+"
)
# Lowering and running ask for a backend too: these tell only when no other frame does.
_ASKED_BACKEND = re.compile(r"xla_bridge\.py:(_?get_backend\w*|canonicalize_platform)")
_IMPORT = re.compile(r"<frozen importlib\._bootstrap.*")
_ORDER = (
    (Phase.COMPILE_BEGIN, _COMPILE),
    (Phase.JAX_IMPORTED, _BACKEND),
    (Phase.AUDITED, _LOWER),
    (Phase.CONFIGURED, _TRACE),
    (Phase.BUDGETED, _RUN),
    (Phase.START, _IMPORT),
)
_PLUMBING = re.compile(r"(profiler|traceback_util|api_boundary|contextlib|functools)\.py:.*")
_NAMES = {"pxla.py:__call__": "ExecuteReplicated.__call__"}


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    path: str
    function: str

    @property
    def in_jax(self) -> bool:
        """Of jax itself, however it was installed."""
        return "/jax/_src/" in self.path or "/jaxlib/" in self.path

    @property
    def place(self) -> str:
        """``pxla.py:__call__``."""
        return f"{self.path.rpartition('/')[2]}:{self.function}"

    @property
    def name(self) -> str:
        """For a signature."""
        return _NAMES.get(self.place, self.function) if self.in_jax else self.function


def read_frame(line: str) -> Frame | None:
    """A frame of either kind of listing; None for any other line."""
    match = _FRAME.match(line)
    if match is None:
        return None
    return Frame(match["path"], match["function"].rpartition(".")[2])


def read_dumps(lines: Sequence[str]) -> tuple[tuple[Frame, ...], ...]:
    """Threads that faulthandler printed, the one that died first; frames innermost first."""
    threads: list[tuple[bool, list[Frame]]] = []
    inside = False
    for line in lines:
        header = _THREAD.match(line)
        if header is not None:
            threads.append((header["current"] == "Current thread", []))
            inside = True
            continue
        frame = read_frame(line) if inside else None
        if frame is not None:
            threads[-1][1].append(frame)
        else:
            inside = inside and not line.strip()
    threads.sort(key=lambda thread: not thread[0])
    return tuple(tuple(frames) for _, frames in threads if frames)


def phase_of(frames: Sequence[Frame]) -> tuple[Phase | None, Frame | None]:
    """The phase that the innermost telling frame is in, and that frame. Innermost first."""
    for frame in frames:
        place = frame.path if frame.path.startswith("<frozen") else frame.place
        if not (frame.in_jax or place.startswith("<frozen")):
            continue
        for phase, pattern in _ORDER:
            if pattern.fullmatch(place):
                return phase, frame
    for frame in frames:
        if frame.in_jax and _ASKED_BACKEND.fullmatch(frame.place):
            return Phase.JAX_IMPORTED, frame
    return None, None


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is not mere plumbing."""
    for frame in frames:
        if not _PLUMBING.fullmatch(frame.place):
            return frame
    return None


def phase_of_threads(threads: Sequence[Sequence[Frame]]) -> tuple[Phase | None, Frame | None]:
    """Of several threads: the one that died, else one that compiles, else the first that tells."""
    told = [found for found in map(phase_of, threads) if found[0] is not None]
    if not told:
        return None, None
    if threads and phase_of(threads[0])[0] is not None:
        return told[0]
    compiling = [found for found in told if found[0] is Phase.COMPILE_BEGIN]
    return (compiling or told)[0]
