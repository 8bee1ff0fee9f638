"""A sealed message that its sender withdrew and NFS still lists counts as gone, without a failure."""

import errno

import pytest
from fsspec.implementations.local import LocalFileSystem

from wsi_fl.hospitals.transports import fsspec_adapter as module
from wsi_fl.hospitals.transports.folder_transport import list_messages
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.sealed_messages import HANDSHAKE

TOPIC = "ab" * 32


@pytest.fixture
def stale_handles(monkeypatch):
    """How often a file is a stale handle, by the end of its name; it counts down."""
    left, opened, remove = {}, module._open_regular_file, LocalFileSystem.rm_file

    def require_fresh(path):
        for end, times in left.items():
            if path.endswith(end) and times:
                left[end] -= 1
                raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(module, "_open_regular_file", lambda path: (require_fresh(path), opened(path))[1])
    monkeypatch.setattr(LocalFileSystem, "rm_file", lambda fs, path: (require_fresh(path), remove(fs, path))[1])
    return left


@pytest.fixture
def share(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    return SharedFolder(str(tmp_path))


def test_the_replacement_of_a_stale_message_is_read(share, stale_handles):
    stale_handles["/a"] = 1
    assert share.read(9, "a") == b"old" and not stale_handles["/a"]


@pytest.mark.parametrize("action", [lambda share: share.read(9, "a"), lambda share: share.remove_file("a")])
def test_a_message_that_stays_stale_counts_as_gone(share, stale_handles, action):
    stale_handles["/a"] = 9
    with pytest.raises(FileNotFoundError, match="Stale"):
        action(share)


def test_another_failure_of_the_folder_is_reported_unchanged(share, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "_open_regular_file", fail)
    with pytest.raises(OSError, match="Input/output error") as told:
        share.read(9, "a")
    assert not isinstance(told.value, FileNotFoundError)


def test_a_stale_handshake_hides_no_other_handshake(tmp_path, stale_handles):
    share, names = (SharedFolder(str(tmp_path)), [f"{site}~{HANDSHAKE}~{'0' * 32}.letter" for site in ("A", "B")])
    for name in names:
        share.write(b"hello", f"wsi-fl-{TOPIC[:16]}", "C", name)
    stale_handles[f"/{names[0]}"] = 9
    assert [found.sender for found in list_messages(str(tmp_path), TOPIC)] == ["B"]
