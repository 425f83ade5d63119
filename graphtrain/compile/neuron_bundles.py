"""Compilation of bundles, on a machine that has neuronx-cc, into executables of the cache."""

import dataclasses
import hashlib
from pathlib import Path

from graphtrain.cache import Cache
from graphtrain.cache.bundles import read
from graphtrain.cache.key import CacheKey
from graphtrain.errors import CacheError
from lowering.artifact import Artifact
from lowering.machine.toolchain import Toolchain
from lowering.neuron import bundle
from lowering.neuron.compiler import HLO_FILE


def compile_bundle(directory: Path, cache: Cache) -> str:
    """Compile a bundle into the cache; return the digest of its program key.

    The keys are those of the machine that wrote the bundle, with this machine's compiler version
    and flags. A run on this machine finds the program if the rest of its toolchain is the same.

    Raises:
        CacheError: the directory contains no bundle or a damaged one, or the cache cannot be
            written.
        LoweringError: neuronx-cc is not installed on this machine, or rejects the program.
    """
    program, request, files = read(directory)
    expected_digest = (program.part("options") or {}).get("hlo")
    if hashlib.sha256(files.get(HLO_FILE, b"")).hexdigest() != expected_digest:
        raise CacheError(
            f"{HLO_FILE} does not match the digest in the bundle's keys; copy the bundle again"
        )
    payload, record, flags, version = bundle.finish(files)
    options = program.part("options") | {"flags": flags, "compiler": version}
    toolchain = _with_compiler(request)
    key = _replace(program, options=options, toolchain=toolchain)
    cache.put(key, Artifact(payload, record))
    graph = str(request.part("graph") or program.part("graph"))
    cache.record_request(_replace(request, toolchain=toolchain), key, graph=graph)
    return key.digest


def _with_compiler(request: CacheKey) -> dict:
    """Return a request's toolchain with the compiler version and flags of this machine."""
    local_toolchain, bundled_toolchain = Toolchain.current("neuron"), request.part("toolchain")
    versions = {k: v for k, v in bundled_toolchain["versions"].items() if k != "neuronx-cc"}
    environment = {
        k: v for k, v in bundled_toolchain["environment"].items() if k != "NEURON_CC_FLAGS"
    }
    versions |= {k: v for k, v in local_toolchain.versions.items() if k == "neuronx-cc"}
    environment |= {k: v for k, v in local_toolchain.environment.items() if k == "NEURON_CC_FLAGS"}
    return dataclasses.asdict(Toolchain(versions, environment))


def _replace(key: CacheKey, **parts: object) -> CacheKey:
    return CacheKey.of(**key.to_json() | parts)
