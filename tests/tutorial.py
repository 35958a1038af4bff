"""The package that docs/guides/write-a-policy.md writes, as it stands there."""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "write-a-policy.md"
_FILE = re.compile(r"`([\w./-]+)`:\n\n```\w+\n(.*?)```\n", re.DOTALL)
_CLASS = re.compile(r"```python\n(class .*?)```\n", re.DOTALL)
POLICY, ORDER = "keep_free:KeepFree", "keep_free:Patience"


def files() -> dict[str, str]:
    """Every file that the page names, by its path; the order that it shows at last is added to the module."""
    page = PAGE.read_text()
    found = dict(_FILE.findall(page))
    found["keep-free/keep_free.py"] += "\n\n" + "\n\n".join(_CLASS.findall(page))
    return found


def write(folder: Path) -> Path:
    """Returns the folder that must be on PYTHONPATH."""
    for name, text in files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / "keep-free"


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed, for this process."""
    monkeypatch.syspath_prepend(str(write(folder)))
    monkeypatch.delitem(sys.modules, "keep_free", raising=False)
