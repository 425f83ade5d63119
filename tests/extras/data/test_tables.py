"""Conversations in the columns of a table."""

import json

from graphtrain.data.prepare.instructions import instruct


def conversation(number):
    turns = range(1 + number % 3)
    pairs = [[("user", f"Q{number}.{turn}"), ("assistant", f"A{number}.{turn}")] for turn in turns]
    return {"messages": [{"role": role, "content": text} for pair in pairs for role, text in pair]}


def test_tables_of_nested_columns_are_read_like_lines(tmp_path):
    import pyarrow
    import pyarrow.parquet

    records = [conversation(number) for number in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    made = []
    for name in ("a.jsonl", "a.parquet"):
        instruct([tmp_path / name], tmp_path / name[2:], "bytes", template="chatml", validation=0)
        made.append([path.read_bytes() for path in sorted(tmp_path.glob(f"{name[2:]}/train*.???"))])
    assert made[0] == made[1] and len(made[0]) == 4
