"""The signatures of what Tandem calls of FlashInfer, read from its source: to import it takes a GPU's libraries.

They are kept in `flashinfer_signatures.json`, since the package is 100 MB. After a release of it:

    python -m tests.backends.flashinfer_signatures flashinfer_python-*.whl
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
PAGED = ["__init__", "plan", "run"]
SOURCES = {
    "flashinfer/prefill.py": {
        "BatchPrefillWithPagedKVCacheWrapper": PAGED,
        "BatchPrefillWithRaggedKVCacheWrapper": PAGED,
    },
    # plan() hands its keywords on to _plan_impl().
    "flashinfer/decode.py": {"BatchDecodeWithPagedKVCacheWrapper": [*PAGED, "_plan_impl"]},
    "flashinfer/mla/_batch_mla/_wrapper.py": {"BatchMLAPagedAttentionWrapper": PAGED},
    "flashinfer/mla/_batch_mla/_contracts.py": {"MLAPlanMetadata": ["csr"]},
    "flashinfer/cascade.py": {"": ["merge_state"]},
}

Parameters = list[tuple[str, str, str | None]]  # name, kind, source of the default


def read(source_of: Callable[[str], str]) -> dict[str, Parameters]:
    """The parameters of every callable of SOURCES. `source_of` gives the text of a file of the package."""
    found = {}
    for path, owners in SOURCES.items():
        module = ast.parse(source_of(path))
        for owner, names in owners.items():
            body = next(
                (node.body for node in module.body if getattr(node, "name", None) == owner), module.body
            )
            for node in body:
                # Of an overloaded function, the last definition is the function itself.
                if isinstance(node, ast.FunctionDef) and node.name in names:
                    found[f"{owner}.{node.name}".lstrip(".")] = _parameters(node.args)
            missing = {f"{owner}.{name}".lstrip(".") for name in names} - found.keys()
            if missing:
                raise LookupError(f"{path} has no {', '.join(sorted(missing))}")
    return found


def _parameters(args: ast.arguments) -> Parameters:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    parameters: Parameters = [
        (arg.arg, "POSITIONAL_OR_KEYWORD", ast.unparse(default) if default else None)
        for arg, default in zip(positional, defaults, strict=True)
    ]
    if args.vararg:
        parameters.append((args.vararg.arg, "VAR_POSITIONAL", None))
    parameters += [
        (arg.arg, "KEYWORD_ONLY", ast.unparse(default) if default else None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parameters.append((args.kwarg.arg, "VAR_KEYWORD", None))
    return parameters


def recorded() -> dict[str, Any]:
    """The content of the file: `version` of the package and `callables`."""
    return json.loads(FILE.read_text())


def signatures() -> dict[str, inspect.Signature]:
    """Of each callable, self or cls included."""
    return {
        name: inspect.Signature(
            [
                inspect.Parameter(
                    parameter,
                    getattr(inspect.Parameter, kind),
                    default=inspect.Parameter.empty if default is None else ast.literal_eval(default),
                )
                for parameter, kind, default in parameters
            ]
        )
        for name, parameters in recorded()["callables"].items()
    }


def main(wheel: Path) -> None:
    """Write the file anew from a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        callables = read(lambda path: archive.read(path).decode())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(callables[name])}" for name in sorted(callables))
    version = json.dumps(wheel.name.split("-")[1])
    FILE.write_text(f'{{"version": {version}, "callables": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
