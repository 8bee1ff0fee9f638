"""A kit: what somebody needs to take part in a federation, in one folder; its key was made there and stays there.

`startup/` and `local/` are what NVIDIA FLARE reads. `federation.json` says who the kit is of and how the others are
reached: by a server, or by a folder that all can reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.trust.certificates import Identity, Role
from wsi_fl.system.files import ordinary, read_json
from wsi_fl.system.locks import alone
from wsi_fl.types import UsageError

STEM = {"server": "server", "coordinator": "client", "hospital": "client"}
"""How FLARE calls the files of a role."""


@dataclass(frozen=True)
class Kit:
    """A folder with a key, its certificate and the federation's root.

    Attributes:
        document: what `federation.json` says.
    """

    path: Path
    document: dict[str, Any]

    @staticmethod
    def open(path: Path) -> Kit:
        """Read a kit.

        Raises:
            UsageError: when the folder is none.
        """
        file = path / "federation.json"
        if not file.is_file():
            raise UsageError(
                f"{path}: this is no kit (a folder with federation.json); `wsi-fl federation join` makes one"
            )
        return Kit(path.resolve(), dict(read_json(file)))

    @property
    def name(self) -> str:
        """Whose it is."""
        return str(self.document["name"])

    @property
    def role(self) -> Role:
        role: Role = self.document["role"]
        return role

    @property
    def folder(self) -> str | None:
        """The address of the folder that all can reach; None where a server joins them."""
        found = self.document.get("folder")
        return str(found) if found else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the kit for this process: two of one name would take each other's letters.

        Raises:
            WsiFlError: when another process has it.
        """
        busy = f"{self.name} runs already: another process has {self.path}; end it first"
        with alone(self.path / ".lock", busy):
            yield

    def identity(self) -> Identity:
        """Return the key and its certificate.

        Raises:
            UsageError: when files are missing or do not belong together, or the certificate does not hold now.
        """
        stem, startup = STEM[self.role], self.path / "startup"
        try:
            texts = [
                ordinary(startup / name).read_text() for name in (f"{stem}.key", f"{stem}.crt", "rootCA.pem")
            ]
        except OSError as error:
            raise UsageError(
                f"{self.path}: this kit is incomplete: {error.filename} cannot be read"
            ) from None
        identity = Identity.load(*texts)
        if identity.name != self.name:
            raise UsageError(
                f"{self.path}: this kit says {self.name}, and its certificate is that of {identity.name}"
            )
        return identity
