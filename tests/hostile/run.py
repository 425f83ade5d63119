"""Give damaged files and odd options to the command, and count what no input may cause.

    python tests/hostile/run.py [--seed N] [TRIAL ...]

Trials: configurations, models, stores, records, flips. Each prints its counts: read, refused by an
error of the user, and defects: tracebacks, over 5 s, code of a file that ran, damage that nothing
reports. The status is 1 if there are defects. Works in a temporary directory; takes minutes, so
this is in no tier. tests/unit/test_parsers.py tries a few of the same in every test run.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import damage  # noqa: E402
import flips  # noqa: E402
import models  # noqa: E402
import parsers  # noqa: E402

from graphtrain.cli import _root  # noqa: E402
from graphtrain.config.settings import known_settings  # noqa: E402

SECONDS = 5


class Trial:
    """Counts of one trial."""

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, Counter[str]()

    def attempt(self, action: Callable[[], Any], done: object) -> None:
        """Run an action on damaged input, and count its outcome."""
        try:
            self.counts["read" if damage.only_user_errors(action, SECONDS) else "refused"] += 1
        except damage.Defect as defect:
            self.counts["DEFECT"] += 1
            print(f"{self.name}: {done}\n    {defect}", flush=True)
            if defect.__cause__ is not None:
                frames = traceback.extract_tb(defect.__cause__.__traceback__)[-4:]
                print(f"    {[f'{Path(f.filename).name}:{f.lineno}' for f in frames]}", flush=True)

    def close(self) -> bool:
        """Print the counts; return whether there are no defects."""
        print(f"{self.name}: {sum(self.counts.values())}: {dict(self.counts)}", flush=True)
        return not self.counts["DEFECT"]


def command(*words: str) -> None:
    """Run the command in this process; what it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            _root.main(list(words), standalone_mode=False)
        except SystemExit as ended:
            if ended.code not in (0, None, 2, 3, 5):
                raise damage.Defect(f"status {ended.code}") from ended


def configurations(place: Path, seed: int) -> bool:
    """1,000 configurations with damage in a file, in --set, or in both, through four commands."""
    trial, random = Trial("configurations"), Random(seed)
    sound = place / "sound"
    sound.mkdir()
    parsers.PARSERS["configuration"].write(sound)
    settings = [".".join(path) for path in known_settings()]
    for number in range(1000):
        done = "sound"
        parsers.copy_files(sound, place / "copy")
        if number % 2:
            done = parsers.damage_copy("configuration", sound, place / "copy", random)
        words = random.choice(
            (
                ["plan", "a.toml", "--no-compile"],
                ["config", "show", "a.toml"],
                ["launch", "kubernetes", "a.toml", "--image", "i", "--claim", "c"],
                ["cache", "explain", "a.toml", "--cache", "cache"],
            )
        )
        changes = [
            f"{random.choice(settings)}={random.choice(damage.ODD_TOML)}"
            for _ in range(random.choice((0, 1, 2)) if number % 2 else 1)
        ]
        words += [word for change in changes for word in ("--set", change)]
        with contextlib.chdir(place / "copy"):
            trial.attempt(lambda words=words: command(*words), (done, words))
    return trial.close()


def model_folders(place: Path, seed: int) -> bool:
    """300 folders of Hugging Face models through the converter and the compile front."""
    trial, random = Trial("models"), Random(seed)
    canary = place / "canary"
    models.write(place)
    hf = f"program.model.hf={place / 'single'}"
    command("plan", str(place / "a.toml"), "--no-compile", "--set", hf)  # imports PyTorch
    for number in range(300):
        folder, done = models.damaged(place, random, canary)
        if number % 3:
            words = ["convert", "hf-to-graphtrain", str(folder), str(place / "out")]
        else:
            words = ["plan", str(place / "a.toml"), "--no-compile"]
            words += ["--set", f"program.model.hf={folder}"]
        with contextlib.chdir(place):
            trial.attempt(lambda words=words: command(*words), (done, words))
        shutil.rmtree(place / "out", ignore_errors=True)
        if canary.exists():
            trial.attempt(models.executed, done)
            canary.rmdir()
    return trial.close()


def stores(place: Path, seed: int) -> bool:
    """100 caches of compiled programs with damage, through six commands each."""
    trial, random = Trial("stores"), Random(seed)
    sound = place / "sound"
    sound.mkdir()
    parsers.PARSERS["cache"].write(sound)
    for _ in range(100):
        done = [parsers.damage_copy("cache", sound, place / "copy", random)]
        cache = str(place / "copy" / "cache")
        program = next(iter(sorted((sound / "cache/v1/programs").iterdir()))).name
        for words in (["ls", "--json"], ["show", program], ["verify"], ["verify", "--repair"],
                      ["gc"], ["ls"]):  # fmt: skip
            trial.attempt(
                lambda words=words, cache=cache: command("cache", *words, "--cache", cache), done
            )
    return trial.close()


def records(place: Path, seed: int) -> bool:
    """Damaged metadata, manifests, journals and other records: 50 of each."""
    trial, random = Trial("records"), Random(seed)
    for name, parser in parsers.PARSERS.items():
        sound = place / name / "sound"
        sound.mkdir(parents=True)
        parser.write(sound)
        for _ in range(50):
            done = parsers.damage_copy(name, sound, place / name / "copy", random)
            copy = place / name / "copy"
            trial.attempt(lambda parser=parser, copy=copy: parser.read(copy), (name, done))
    return trial.close()


def flipped_bytes(place: Path, seed: int) -> bool:
    """200 flips of a bit over all files of a run directory and its dataset: none is silent."""
    trial, random = Trial("flips"), Random(seed)
    run = flips.TinyRun(place, command)
    for _ in range(200):
        path, position = run.flip(random)
        trial.attempt(run.check, f"{path.relative_to(place)} at {position}")
        run.restore()
        run.outcomes[run.outcome] += 1
    print(f"flips by outcome: {dict(run.outcomes)}")
    return trial.close()


TRIALS = {
    "configurations": configurations,
    "models": model_folders,
    "stores": stores,
    "records": records,
    "flips": flipped_bytes,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("trials", nargs="*", metavar="TRIAL", help=", ".join(TRIALS))
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    results = []
    for name in chosen.trials or TRIALS:
        with tempfile.TemporaryDirectory(prefix="hostile-") as place:
            os.environ["XDG_CONFIG_HOME"] = f"{place}/config"
            results.append(TRIALS[name](Path(place).resolve(), chosen.seed))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
