"""Write the pages of docs/reference that are made from the code: `make reference`."""

from collections.abc import Callable
from pathlib import Path

import commands_page
import errors_page
import families_page
import machines_page
import metrics_page
import names_page
import presets_page
import python_page

from graphtrain.config.reference import reference as settings_page

FOLDER = Path(__file__).parents[1] / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page.page,
    "errors.md": errors_page.page,
    "families.md": families_page.page,
    "machines.md": machines_page.page,
    "metrics.md": metrics_page.page,
    "names-elsewhere.md": names_page.page,
    "presets.md": presets_page.page,
    "python-functions.md": python_page.page,
    "settings.md": settings_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
