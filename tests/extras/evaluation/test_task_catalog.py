"""Tasks by name: those that lm-eval's own index finds."""

from pathlib import Path

from lm_eval.tasks._index import TaskIndex

from graphtrain.run.evaluation.task_catalog import TaskCatalog

FILES = {
    "a/first.yaml": "task: first\ntag:\n  - both\noutput_type: multiple_choice\n",
    "a/second.yaml": "include: first.yaml\ntask: second\n",
    "a/third.yaml": "include: second.yaml\ntask: third\ntag: other\n",
    "b/template_yaml": "tag: shared\ndataset_path: json\n",
    "b/deeper/fourth.yaml": "include: ../template_yaml\ntask: fourth\n",
    "b/deeper/fifth.yaml": "include:\n  - ../../a/first.yaml\n  - ../template_yaml\ntask: fifth\n",
    "b-c/sixth.yaml": "task: sixth\ndataset_path: first\n",
    "b/sixth.yaml": "task: sixth\ndataset_path: second\n",
}


def test_a_tag_has_the_tasks_that_inherit_it_from_files_that_they_include(tmp_path: Path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    index = TaskIndex.build([tmp_path])
    for tag in ("both", "other", "shared"):
        names = [task.name for task in TaskCatalog(tmp_path).tasks(tag)]
        assert names == sorted(index[tag].tags), tag
    assert sorted(index["both"].tags) == ["first", "second"]
    (sixth,) = TaskCatalog(tmp_path).tasks("sixth")
    assert sixth.path == index["sixth"].yaml_path
