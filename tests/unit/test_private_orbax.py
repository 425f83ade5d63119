"""Canaries: each private interface of Orbax and TensorStore in private_orbax.py still works.

Run these first with a new version of Orbax. A failure names the function and what to do.
"""

import asyncio
import gc
import logging
import sys
import tracemalloc
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from canaries import guarded_functions, make_canary, public_functions

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.checkpoint import check_directory
from graphtrain.errors import TrainingError

REMEDIES = {
    "complete_steps": "orbax: find how a complete checkpoint is told from an unfinished one "
    "(step_lib, temporary_paths), and change what names count.",
    "read_json_item": "orbax/checkpoint, JsonCheckpointHandler: find the file's new name.",
    "open_array": "orbax.readthedocs.io, Checkpoint format: find the driver, and the names of "
    "arrays. Older checkpoints must stay readable.",
    "whole_shard_handlers": "orbax/checkpoint/type_handlers, ArrayHandler: find what turns "
    "use_replica_parallel off. Saving must compile nothing.",
    "host_array_handlers": "orbax/checkpoint/type_handlers, NumpyHandler: find what turns the copy "
    "off. Resharding writes arrays larger than the memory.",
    "background_errors": "orbax/checkpoint/_src/checkpointers/async_checkpointer.py and "
    "_src/futures/future.py: find where the error of a thread is logged. A rank whose disk is full "
    "must be named.",
    "caused_by_lost_peer": "orbax/checkpoint/_src/checkpointers/async_checkpointer.py: find what a "
    "save raises when a barrier fails. A lost rank must not look like a full disk.",
    "before_commit": "orbax/checkpoint/_src/path/atomicity.py, AtomicRenameTemporaryPath: find "
    "what renames a finished directory. A checkpoint must never be complete without its manifest.",
    "synchronization": "orbax/checkpoint/options.py, MultiprocessingOptions: find what makes it "
    "synchronize through the coordination service, not by a collective.",
}


canary = make_canary(
    private_orbax,
    REMEDIES,
    f"orbax {ocp.__version__} changed a private interface.",
)


def test_every_private_interface_has_a_canary_and_a_remedy():
    public = public_functions(private_orbax)
    assert public == guarded_functions(globals()) == set(REMEDIES)


def test_what_orbax_logs_of_an_interrupted_save_is_not_said(caplog):
    private_orbax.background_errors()
    for line in (
        "Attempted to create temporary directory %s which already exists. Removing existing",
        "Metadata file does not exist: %s",
        "something else of %s",
    ):
        logging.getLogger("absl").warning(line, "run/checkpoints/380")
    assert [one.getMessage() for one in caplog.records] == ["something else of run/checkpoints/380"]


STATE = {"parameters": {"head": np.arange(24, dtype=np.float32).reshape(4, 6)}}


def save(directory, state, registry, processes=1, **options):
    with ocp.CheckpointManager(
        directory,
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            "about": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            create=False,
            multiprocessing_options=private_orbax.synchronization(processes),
            **options,
        ),
    ) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave({"loader": 7})
        )
        manager.save(3, args=items)
        manager.wait_until_finished()


@canary("complete_steps", "read_json_item", "open_array", "whole_shard_handlers")
def test_a_checkpoint_is_read_without_orbax(tmp_path):
    state = jax.tree.map(jnp.asarray, STATE)
    save(tmp_path, state, private_orbax.whole_shard_handlers())
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    assert private_orbax.complete_steps(tmp_path) == [3]
    assert private_orbax.complete_steps(tmp_path / "none") == []
    assert private_orbax.read_json_item(tmp_path / "3", "about") == {"loader": 7}
    array = private_orbax.open_array(tmp_path / "3", "parameters/head", cache_bytes=1 << 20)
    part = array[1:3, 2:].read().result()
    np.testing.assert_array_equal(part, STATE["parameters"]["head"][1:3, 2:])
    written = private_orbax.open_array(tmp_path / "3", "parameters/head", write=True)
    written[0].write(np.full(6, 9, np.float32)).result()
    np.testing.assert_array_equal(array[0].read().result(), np.full(6, 9.0))


@canary("complete_steps", "open_array")
def test_what_is_missing_or_damaged_raises_the_errors_that_are_converted(tmp_path):
    (tmp_path / "3" / "state").mkdir(parents=True)
    with pytest.raises(private_orbax.STORAGE_ERRORS):
        private_orbax.open_array(tmp_path / "3", "parameters/head")


@canary("whole_shard_handlers")
def test_replicas_are_written_without_compiling(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put(STATE, replicated)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    save(tmp_path, state, private_orbax.whole_shard_handlers())
    assert not [name for name in compiled if "compile" in name]


@canary("host_array_handlers")
def test_arrays_of_the_host_are_written_without_a_copy(tmp_path):
    zeros = {"zeros": np.broadcast_to(np.float32(0), (1 << 13, 1 << 13))}  # 256 MiB, if copied
    registry = private_orbax.host_array_handlers()
    pieces = {"zeros": ocp.SaveArgs(chunk_byte_size=16 << 20)}
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), ocp.Checkpointer(handler) as opened:
            warnings.simplefilter("error")
            opened.save(tmp_path / "zeros", args=ocp.args.PyTreeSave(zeros, save_args=pieces))
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


@canary("synchronization")
def test_processes_synchronize_by_the_service():
    assert private_orbax.synchronization(1).active_processes is None
    assert private_orbax.synchronization(3).active_processes == {0, 1, 2}


@canary("before_commit")
def test_a_function_is_called_once_before_a_checkpoint_is_renamed(tmp_path):
    called = []

    def note(path):
        called.append(path.name)
        assert (path / "about" / "metadata").is_file() and (path / "state" / "_METADATA").is_file()
        assert private_orbax.complete_steps(tmp_path) == []
        (path / "manifest.json").write_text("{}")

    registry = private_orbax.whole_shard_handlers()
    path_class = private_orbax.before_commit(note)
    save(tmp_path, jax.tree.map(jnp.asarray, STATE), registry, temporary_path_class=path_class)
    assert len(called) == 1 and called[0] != "3"
    assert (tmp_path / "3" / "manifest.json").read_text() == "{}"


def test_a_path_with_a_pattern_is_still_refused_for_a_reason(tmp_path):
    """Once this fails, Orbax no longer uses patterns: remove PATTERN_CHARACTERS and its check."""
    directory = tmp_path / "a[b]"
    directory.mkdir()
    save(directory, jax.tree.map(jnp.asarray, STATE), private_orbax.whole_shard_handlers())
    with pytest.raises(private_orbax.STORAGE_ERRORS):
        private_orbax.open_array(directory / "3", "parameters/head")


@pytest.mark.parametrize("character", private_orbax.PATTERN_CHARACTERS)
def test_a_run_directory_with_a_pattern_is_refused(tmp_path, character):
    with pytest.raises(TrainingError, match="which Orbax takes for a pattern"):
        check_directory(tmp_path / f"a{character}b")


@canary("background_errors")
def test_the_error_of_a_background_thread_is_noted_and_its_traceback_left_out(tmp_path, capfd):
    def fail(path):
        raise OSError(28, "No space left on device")

    errors = private_orbax.background_errors()
    path_class = private_orbax.before_commit(fail)
    state, registry = jax.tree.map(jnp.asarray, STATE), private_orbax.whole_shard_handlers()
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, state, registry, temporary_path_class=path_class)
    assert errors and "No space left" in str(errors[0])
    assert not capfd.readouterr().err
    assert private_orbax.background_errors() == []


def test_an_operation_that_finds_the_event_loop_closed_is_not_printed(monkeypatch):
    unraisable, other = [], SimpleNamespace(exc_value=ValueError("other"), exc_traceback=None)
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    private_orbax.background_errors()
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as closed:
        loop.call_soon_threadsafe(print)
    trace = closed.tb.tb_next  # as if C++ code had called it
    sys.unraisablehook(SimpleNamespace(exc_value=closed.value, exc_traceback=trace))
    sys.unraisablehook(other)
    assert unraisable == [other]


@pytest.mark.parametrize(
    ("file", "error", "printed"),
    [
        ("/site-packages/orbax/checkpoint/serialization.py", OSError(27, "too large"), False),
        ("/site-packages/orbax/checkpoint/serialization.py", TypeError("a defect"), True),
        ("/site-packages/other.py", OSError(27, "too large"), True),
    ],
)
def test_arrays_that_fail_after_the_first_one_are_not_printed(file, error, printed, caplog):
    private_orbax.background_errors()
    names = {"error": error}
    exec(compile("async def write():\n    raise error", file, "exec"), names)

    async def save():
        task = asyncio.create_task(names["write"]())
        while not task.done():
            await asyncio.sleep(0)

    asyncio.run(save())
    gc.collect()
    told = [one.getMessage() for one in caplog.records if one.name == "asyncio"]
    assert [one for one in told if "never retrieved" in one] == told and bool(told) == printed


@canary("caused_by_lost_peer")
def test_a_barrier_that_fails_is_not_a_failure_to_write(tmp_path, monkeypatch):
    from orbax.checkpoint._src.checkpointers import async_checkpointer

    def lose(key, timeout):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is gone")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    options = {"barrier_sync_key_prefix": "", "timeout_secs": 5, "primary_host": 0}
    with pytest.raises(TimeoutError) as raised:
        async_checkpointer._background_wait_for_commit_futures(
            tmp_path, [], lambda: None, sync_fn=lose, **options
        )
    assert private_orbax.caused_by_lost_peer(raised.value)
    assert not private_orbax.caused_by_lost_peer(OSError(28, "No space left on device"))
