"""What `make gpu-check` found about the Triton kernels, compiled without a GPU."""

from coneheads.lab.gpu_check import Promise
from tables import markdown_table, saved_results

KERNELS = ("forward", "rows", "queries", "keys", "together")


def gpu_table() -> str:
    """The promised ratios, and whether all kernels passed the gate."""
    found = saved_results("gpu", 'make gpu-check GPU="--save docs/results/gpu.json"')
    rows = []
    for promise in found["promises"]:
        ratios = [Promise(**promise).shown(kernel) for kernel in KERNELS]
        rows.append([f"sm_{promise['arch']}", promise["dtype"], promise["score"], f"{promise['at_most']:g}", *ratios])
    table = markdown_table(["", "dtype", "score", "aim", *KERNELS], rows)
    plain = [line for line in found["gate"] if not line["full"]]
    full = [line for line in found["gate"] if line["full"]]
    registers, shared = (max(line[name] for line in plain) for name in ("registers", "shared"))
    by_arch = ", ".join(f"sm_{line['arch']}: {passed([line])}" for line in plain)
    machine = found["machine"]
    return f"""{table}

{passed(plain)} kernels of the gate compile without a spill, with {registers} registers and {shared / 1024:.0f} KB
of shared memory at most ({by_arch}). Of the calls with mask, dropout, causality and learned parameters
at once, which are not in the gate, {passed(full)} do.
Triton {machine["triton"]}, coneheads {machine["coneheads"]} at {machine["commit"]}, {machine["date"]}."""


def passed(lines: list[dict[str, int]]) -> str:
    total = sum(line["kernels"] for line in lines)
    return f"{total - sum(line['failed'] for line in lines)} of {total}"
