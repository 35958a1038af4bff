"""The folder from which the baseline's Python imports."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from deployments.plain_vllm import _own_folder
from policies.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"plain-vllm-{os.getuid()}"


def test_it_is_this_user_s_alone_and_found_again(folder: Path) -> None:
    assert _own_folder() == _own_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_it_is_refused_where_others_may_write(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="plain-vllm"):
        _own_folder()


def test_a_link_and_a_folder_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError):
        _own_folder()
    folder.unlink()
    folder.mkdir(mode=0o700)
    other = os.getuid() + 1
    folder.rename(folder.with_name(f"plain-vllm-{other}"))
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError):
        _own_folder()
