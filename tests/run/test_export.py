"""run.export: a folder appears when it is whole, however often its process is killed."""

import os
import signal

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from graphtrain.checkpoints import output_directory
from graphtrain.run.export_process import ExportJob, export
from graphtrain.weights import hf_export, hf_files, writer

job = ExportJob("run", 4, None)
calls = 0

def dying(function, at):
    def call(*arguments, **others):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **others)
    return call

def child(at):
    for place, name in (
        (writer.SafetensorsWriter, "write"), (hf_export, "_write_config"),
        (hf_files, "copy_hf_files"), (hf_export, "_write_files"), (Path, "rename"),
    ):
        setattr(place, name, dying(getattr(place, name), at))
    export(job)
    os._exit(0)

at = 0
while True:  # kill it before its first call, before its second one, ...
    at += 1
    process = os.fork()
    if not process:
        child(at)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
    assert not job.folder.exists(), at
    assert Path("run/.hf-4.unfinished").is_dir()
print(at)
shutil.rmtree(job.folder)
"""


def test_an_export_that_is_killed_anywhere_leaves_no_folder_and_is_finished_by_the_next(place):
    place.command("run", "config.toml", "--set", "run.steps=4")
    process = place.start_python("-W", "ignore", "-c", KILLED)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert int(out.split()[-1]) > 20  # arrays, files, and the renaming
    (place.path / "run/.hf-4.unfinished").mkdir()
    (place.path / "run/.hf-4.unfinished/config.json").write_text("{}")
    words = ["run", "config.toml", "--set", "run.steps=4", "--set", "run.export=hf"]
    process = place.start(*words)  # its process is told by the end of this one
    while process.poll() is None and not (place.path / "run/.hf-4.unfinished").exists():
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    out, _ = place.command(*words)
    assert out.startswith("run already has 4 steps") and "exported to run/hf-4\n" in out
    assert sorted(path.name for path in (place.path / "run/hf-4").iterdir())[:2] == [
        "config.json", "graphtrain.json",
    ]  # fmt: skip
    assert not (place.path / "run/.hf-4.unfinished").exists()
