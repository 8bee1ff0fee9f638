"""Faults that an independent attacker found; each is expected to fail until it is mended."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.test_race import opened, place, released  # noqa: F401
from wsi_fl.learning import transforms
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.stages.site.ledgers import _head_of_user
from wsi_fl.types import UsageError, WsiFlError

fault = pytest.mark.xfail(strict=True)


class Rarely(nn.Module):
    """Drops an example once in twenty times, whatever the mode."""

    def forward(self, x):
        return x * (torch.rand(len(x), 1) > 0.05)


@fault
def test_a_model_that_rarely_draws_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), Rarely(), nn.Linear(8, 2))
    with pytest.raises(UsageError, match="draws random numbers"):
        check_per_example_gradients(model, (3, 4, 4), 2)


@fault
def test_no_shallow_copy_of_a_stream_repeats_its_numbers():
    stream = CipherStream.fresh()
    stream.below(2)
    other = copy.copy(stream)
    assert stream.below(2**60) != other.below(2**60)


@fault
def test_what_augmentation_may_draw_is_never_of_a_public_seed():
    one, other = (transforms._Drawn(CipherStream.fresh()) for _ in range(2))
    assert one.normal() != other.normal()


def both_spend(study, user, users_of_copy):
    copied = shutil.copytree(study, study.parent / "copy")
    released(opened(study, user, "one"), 1, 1.0)
    with pytest.raises(WsiFlError, match="this is not the ledger that"):
        released(opened(copied, users_of_copy, "other"), 1, 2.0)


@fault
def test_copies_share_a_head_that_is_a_link(place):  # noqa: F811
    user, other = place.parent / "user", place.parent / "other"
    other.mkdir()
    shared = shutil.move(user / "C1.head.json", place.parent / "shared.json")
    for folder in (user, other):
        (folder / "C1.head.json").symlink_to(shared)
    both_spend(place, user, other)


@fault
def test_copies_share_the_budget_where_the_state_folder_cannot_be_written(place, monkeypatch):  # noqa: F811
    user, real = place.parent / "user", os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != user and real(path, mode))
    both_spend(place, user, user)


@fault
def test_a_user_without_a_home_is_told_in_one_line(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(WsiFlError):
        _head_of_user("C1")
