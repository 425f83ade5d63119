"""The page of a plan replaces no file that the command did not write."""

from in_process import graphtrain


def test_a_page_replaces_no_other_file(tmp_path):
    (tmp_path / "thesis.json").write_text("{}")
    ended = graphtrain(
        "plan", "examples/quickstart.toml", "--no-compile", "--html", tmp_path / "thesis.json"
    )
    assert ended.status == 2 and "thesis.json exists already" in ended.err
    assert (tmp_path / "thesis.json").read_text() == "{}"
