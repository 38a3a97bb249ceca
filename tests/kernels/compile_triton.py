"""Compiles every kernel, with the block sizes that are served with, for a GPU that need not be here.

`python -m tests.kernels.compile_triton CAPABILITY` prints one JSON object a kernel: its name, its case, the
instructions of the target it came to and the bytes of shared memory it takes. Triton must not be interpreting.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.attention import constants, launch_options
from kernels.triton.kernels import extend_kernel, merge_kernel, split_kernel
from kernels.triton.tiling import block_sizes

CASES: dict[str, dict[str, Any]] = {
    "windowed": dict(
        num_heads=12, num_kv_heads=4, head_dim=128, v_head_dim=128, latent=False, window=512, softcap=50.0
    ),
    "block": dict(
        num_heads=8, num_kv_heads=8, head_dim=96, v_head_dim=64, latent=False, causal=False, slot_scales=True
    ),
    "latent": dict(num_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, latent=True),
    "fp8": dict(num_heads=8, num_kv_heads=4, head_dim=64, v_head_dim=64, latent=False),
}
CACHES = {"block": "*i8", "fp8": "*fp8e4nv"}  # elsewhere as activations
NEEDS = {"fp8": 89}
TABLES = ("slot_table", "sequences", "tiles", "tokens")
ACTIVATIONS = ("query", "key", "value", "out")


def signature(kernel: Any, case: str, sizes: dict[str, Any]) -> dict[str, str]:
    types = dict.fromkeys(TABLES, "*i32") | dict.fromkeys(ACTIVATIONS, "*bf16")
    types |= dict.fromkeys(("key", "value"), CACHES.get(case, "*bf16"))
    types |= dict.fromkeys(("totals", "peaks", "key_scales", "value_scales"), "*fp32")
    types |= dict.fromkeys(("scale", "v_scale"), "fp32")
    return {name: "constexpr" if name in sizes else types.get(name, "i32") for name in kernel.arg_names}


def main(capability: int) -> None:
    for case, shape in CASES.items():
        if capability < NEEDS.get(case, 0):
            continue
        blocks = block_sizes(shape["head_dim"], shape["v_head_dim"], torch.bfloat16)
        sizes = constants(**shape, dtype=torch.bfloat16, blocks=blocks)
        for kernel in (extend_kernel, split_kernel, merge_kernel):
            types = signature(kernel, case, sizes)
            aligned = {
                (index,): [["tt.divisibility", 16]]
                for index, (name, kind) in enumerate(types.items())
                if kind.startswith("*") or name.endswith("_stride")
            }
            taken = {name: sizes[name] for name in kernel.arg_names if name in sizes}
            compiled = triton.compile(
                ASTSource(kernel, types, taken, aligned),
                target=GPUTarget("cuda", capability, 32),
                options=launch_options(blocks),
            )
            target = next(line for line in compiled.asm["ptx"].splitlines() if line.startswith(".target"))
            print(
                json.dumps(
                    {
                        "kernel": kernel.__name__,
                        "case": case,
                        "target": target.split()[1].rstrip(","),
                        "cubin_bytes": len(compiled.asm["cubin"]),
                        "shared_memory": compiled.metadata.shared,
                    }
                )
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))
