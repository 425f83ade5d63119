"""Bundles that were copied badly: refused with what to do, before a compiler is asked."""

import hashlib
import json

import pytest

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.neuron_bundles import compile_bundle
from graphtrain.errors import CacheError
from lowering.errors import LoweringError
from lowering.neuron.compiler import FLAGS_FILE, HLO_FILE, NEFF_FILE

HLO = b"a module"


@pytest.fixture
def bundle(tmp_path):
    """One that lacks only its compiler."""
    key = CacheKey.of(graph="init", options={"hlo": hashlib.sha256(HLO).hexdigest()})
    about = {"target": "trn1:1", "graph": "init", "record": {}, "runs_once": True}
    files = {HLO_FILE: HLO, FLAGS_FILE: b"[]", "bundle.json": json.dumps(about).encode()}
    return Cache(tmp_path).store_bundle(key, key, "init", files)


def test_a_directory_without_keys_is_no_bundle(tmp_path):
    with pytest.raises(CacheError, match=r"not a bundle: it has no keys.json; graphtrain comp"):
        compile_bundle(tmp_path, Cache(tmp_path / "store"))
    with pytest.raises(CacheError, match=r"not a bundle: no such directory"):
        compile_bundle(tmp_path / "none", Cache(tmp_path / "store"))


@pytest.mark.parametrize("text", [None, b"", b"another module"])
def test_a_program_that_its_keys_do_not_name_is_refused(bundle, tmp_path, text):
    (bundle / HLO_FILE).unlink()
    if text is not None:
        (bundle / HLO_FILE).write_bytes(text)
    with pytest.raises(
        CacheError, match=r"model.hlo_module.pb does not match the .*; copy the bundle again"
    ):
        compile_bundle(bundle, Cache(tmp_path / "store"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("bundle.json", None), ("bundle.json", "{}"), ("bundle.json", "[]"), (FLAGS_FILE, "cut of")],
)
def test_a_bundle_that_is_not_whole_is_refused(bundle, tmp_path, name, text):
    (bundle / name).unlink()
    if text is not None:
        (bundle / name).write_text(text)
    with pytest.raises(LoweringError, match=r"the bundle is incomplete .*; copy it again"):
        compile_bundle(bundle, Cache(tmp_path / "store"))


def test_a_neff_of_no_known_compiler_is_refused(bundle, tmp_path):
    (bundle / NEFF_FILE).write_bytes(b"a NEFF")
    with pytest.raises(LoweringError, match=r"incomplete \(KeyError\('compiler_version.txt'\)\)"):
        compile_bundle(bundle, Cache(tmp_path / "store"))
