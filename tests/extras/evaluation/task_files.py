"""Small files of data for tasks of lm-eval, written here."""

import json
from pathlib import Path

WORDS = ["stone", "river", "lamp", "cloud", "seven", "green", "paper", "window", "bread", "engine"]
COUNT = 20


def row(task: str, index: int) -> dict:
    """A row with the fields that a task reads."""
    first, second, third = (WORDS[(index * step + 1) % len(WORDS)] for step in (1, 3, 7))
    choices = [first, second, third, f"{first}s"]
    question = f"Which word comes after {second} in row {index}?"
    rows = {
        "boolq": {"passage": f"A {first} is not a {second}.", "label": index % 2,
                  "question": f"is a {first} a {second}"},
        "mmlu_anatomy": {"question": question, "choices": choices, "answer": index % 4,
                         "subject": "anatomy"},
        "gsm8k": {"question": f"{first} has {index} and gets {index + 2}. How many?",
                  "answer": f"{index} + {index + 2}\n#### {2 * index + 2}"},
        "ceval-valid_law": {"id": index, "question": f"{first}?", "answer": "ABCD"[index % 4],
                            **dict(zip("ABCD", choices, strict=True))},
        "agieval_aqua_rat": {"query": f"Q: {question} Answer Choices: (A){first} (B){second}\nA: ",
                             "choices": ["(A)", "(B)"], "gold": [index % 2]},
        "bbh_zeroshot_boolean_expressions": {"input": f"not {index} is",
                                             "target": str(index % 2 == 1)},
        "humaneval": {"task_id": f"t/{index}", "prompt": f"def f{index}(x):\n    return x +",
                      "test": f"def check(f):\n    assert f(1) == {index}\n",
                      "entry_point": f"f{index}", "canonical_solution": ""},
        "wikitext": {"page": f" = {first} = \n The {second} is n't {third} . " * (1 + 9 * index)},
    }  # fmt: skip
    return rows[task]


SPLITS = {
    "boolq": ["train", "validation"],
    "mmlu_anatomy": ["dev", "test"],
    "gsm8k": ["train", "test"],
    "ceval-valid_law": ["dev", "val"],
    "agieval_aqua_rat": ["test"],
    "bbh_zeroshot_boolean_expressions": ["test"],
    "wikitext": ["test"],
    "humaneval": ["test"],
}


def write_tasks(root: Path, count: int = COUNT) -> Path:
    """Write the files of all tasks."""
    for task, splits in SPLITS.items():
        (root / task).mkdir(parents=True)
        for number, split in enumerate(splits):
            rows = [json.dumps(row(task, count * number + index)) for index in range(count)]
            (root / task / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return root
