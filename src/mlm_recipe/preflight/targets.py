"""Devices to compile for: those attached, or compile-only devices of a target that is not there.

Absent GPUs come from a description of the device (XLA's ``GpuTargetConfigProto``), absent TPUs from
libtpu's own knowledge. What is compiled for them is evidence and is never run.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from mlm_recipe.guard.targets import CHIPS_PER_HOST, TargetSpec, install_command, parse_target
from mlm_recipe.preflight.program import StepProgram

GIB = 2**30
TARGET_CONFIG = "target_config.txtpb"

_NOT_PROVED = {
    "cuda": (
        "choice of kernels: nothing was autotuned, the tuned program can use other kernels and "
        "somewhat other memory",
        "cuDNN: that an engine exists for its fused kernels is not checked without a device",
        "NCCL, CUDA graphs and the allocator: they only exist at run time",
        "numbers: nothing was run",
    ),
    "tpu": ("numbers and step time: nothing was run", "the network between hosts"),
}


class TargetUnavailableError(RuntimeError):
    """The compiler for a target is not installed, or does not know it."""


@dataclass(frozen=True)
class Target:
    """Devices, and what is known of them."""

    spec: TargetSpec
    devices: Sequence[Any]
    platform: str
    device_kind: str
    absent: bool
    budget_bytes: float | None
    """Per device, for arguments, results, temporaries and code."""
    memory_bytes: float | None
    description: str = field(default="", repr=False)
    """The GPU's ``target_config``, where absent."""

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "name": self.spec.name,
            "kind": self.spec.kind,
            "platform": self.platform,
            "device_kind": self.device_kind,
            "count": len(self.devices),
            "absent": self.absent,
            "memory_bytes": self.memory_bytes,
            "not_proved": list(_NOT_PROVED.get(self.platform, ())) if self.absent else [],
            "source": self.spec.figures.get("source"),
        }

    def compile_options(self) -> dict[str, Any]:
        """What a reproducer needs to compile the same way."""
        return {
            "compiler_options": {},
            "num_replicas": 1,
            "num_partitions": len(self.devices),
            "device_count": len(self.devices),
            "platform": self.platform,
            "target": self.spec.name,
            "topology": self.spec.topology if self.platform == "cuda" else None,
            "topology_name": self.spec.topology if self.platform == "tpu" else None,
            "absent": self.absent,
            "target_config_file": TARGET_CONFIG if self.description else None,
            "use_shardy": bool(getattr(jax.config, "jax_use_shardy_partitioner", False)),
        }

    def peak(self, precision: str) -> float | None:
        """FLOP/s of one device at a compute dtype; None where unknown."""
        return self.spec.figures.get("peak", {}).get(precision)

    @property
    def bandwidth(self) -> float | None:
        """Memory bytes/s of one device; None where unknown."""
        return self.spec.figures.get("bandwidth")


def open_target(name: str, limit: Callable[[str], float]) -> Target:
    """Start the backend, or make the compile-only devices.

    Args:
        name: as on the command line.
        limit: gives ``gpu_memory_fraction`` and ``gpu_reserve_gib``.

    Raises:
        TargetUnavailableError: the compiler for it is not installed, or refuses the topology.
        ConfigError: there is no such target.
    """
    spec = parse_target(name)
    if spec.platform == "attached":
        return _attached(spec, limit)
    if spec.platform == "tpu":
        return _absent_tpus(spec)
    return _absent_gpus(spec, limit)


def _attached(spec: TargetSpec, limit: Callable[[str], float]) -> Target:
    devices = jax.devices()
    first = devices[0]
    platform = "cuda" if first.platform == "gpu" else str(first.platform)
    if platform == "cpu":
        memory = float(_host_memory()) / len(devices)
        budget = memory
    else:
        stats = first.memory_stats() or {}
        memory = stats.get("bytes_limit")
        reserve = limit("gpu_reserve_gib") * GIB if platform == "cuda" and len(devices) > 1 else 0
        budget = memory - reserve if memory else None
    return Target(spec, devices, platform, first.device_kind, False, budget, memory)


def _host_memory() -> int:
    """Bytes of this machine, or of the control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):
        return total


def _absent_tpus(spec: TargetSpec) -> Target:
    figures, options = spec.figures, {}
    if "chip_config" in figures:
        options["chip_config_name"] = figures["chip_config"]
    if (spec.count or 0) < CHIPS_PER_HOST:
        sides = [int(side) for side in spec.topology.partition(":")[2].split("x")]
        options["chips_per_host_bounds"] = [*sides, 1][:3]
    devices = _topology(spec, lambda get: get(spec.topology, "tpu", **options))
    available, memory = float(figures["available"]), float(figures["memory"])
    return Target(spec, devices, "tpu", devices[0].device_kind, True, available, memory)


def _absent_gpus(spec: TargetSpec, limit: Callable[[str], float]) -> Target:
    description = spec.description or gpu_description(spec)
    devices = _topology(
        spec,
        lambda get: get(
            topology_name="",
            platform="cuda",
            topology=spec.topology,
            target_config=description,
        ),
    )
    memory = float(spec.figures["memory"])
    named = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    fraction = float(named) if named else limit("gpu_memory_fraction")
    reserve = limit("gpu_reserve_gib") * GIB if len(devices) > 1 else 0
    name = spec.figures.get("name", spec.kind)
    return Target(
        spec, devices, "cuda", name, True, memory * fraction - reserve, memory, description
    )


def _topology(spec: TargetSpec, make: Callable[[Callable[..., Any]], Any]) -> list[Any]:
    from jax.experimental import topologies

    try:
        return list(make(topologies.get_topology_desc).devices)
    except Exception as error:  # jax raises many types here; each means the same to us
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "libtpu_lockfile" in str(error):
            problem = "another process is using libtpu; wait for it to end, then start again"
        elif _is_installed(spec.platform):
            problem = f"the installed compiler does not make such {spec.platform} devices ({said})"
        else:
            problem = f"the compiler for {spec.platform} devices is not installed ({said}); "
            problem += f"install it: {install_command(spec.platform)}"
        raise TargetUnavailableError(f"--target {spec.name}: {problem}") from error


def _is_installed(platform: str) -> bool:
    modules = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
    return any(importlib.util.find_spec(name) is not None for name in modules[platform])


def gpu_description(spec: TargetSpec) -> str:
    """XLA's description of one GPU, in text form, from public figures."""
    figures = spec.figures
    major, minor = figures["compute_capability"]
    feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 and _is_new() else ""
    shared, shared_optin = figures["shared_bytes"]
    per_core = figures["multiprocessors"]
    runtime = (
        '  driver_version: "13.0.0"\n  runtime_version: "13.0.0"\n'
        '  compile_time_toolkit_version: "13.0.0"\n  dnn_version: "9.10.0"\n'
        if _is_new()
        else ""
    )
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_optin}
  threads_per_core_limit: 2048
  core_count: {per_core}
  fpus_per_core: {128 if major >= 9 else 64}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(figures["bandwidth"])}
  l2_cache_size: {figures["l2_bytes"]}
  clock_rate_ghz: {figures["clock_ghz"]}
  device_memory_size: {int(figures["memory"])}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
{_newer_fields(figures["name"]) if _is_new() else ""}{runtime}}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: {10 if _is_new() else 1} patch: 0 }}
{"runtime_version { major: 13 minor: 0 patch: 0 }" if _is_new() else ""}
device_description_str: "{figures["name"]}"
"""


def _newer_fields(name: str) -> str:
    return (
        "  thread_dim_limit_x: 1024\n  thread_dim_limit_y: 1024\n  thread_dim_limit_z: 64\n"
        '  device_vendor: "NVIDIA Corporation"\n  device_address_bits: 64\n'
        f'  pcie_bandwidth: 34359738368\n  ecc_enabled: true\n  name: "{name}"\n'
    )


def _is_new() -> bool:
    """Whether jaxlib's description has the fields of 2026."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 8)


def layouts_of(target: Target, program: StepProgram, compiled: Any) -> list[dict[str, Any]]:
    """How TPU parameters lie in memory; nothing for other devices."""
    from mlm_recipe.preflight.layouts import parameter_layouts

    if target.platform != "tpu" or program.parameters is None:
        return []
    return parameter_layouts(program, compiled)
