"""Open a store's file for reading, after checks of its format, version and checksums."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import h5py

from wsi_fl.stores.checksums import DAMAGE, check_seal
from wsi_fl.stores.fields import check_format, first_line, too_large
from wsi_fl.stores.hdf5 import opened
from wsi_fl.types import WsiFlError


class StoreFile:
    """What readers of all stores have in common; a context manager.

    Attributes:
        path: of the file.
        format: that it must say.
        command: which makes such files.
        rows: the datasets whose rows have checksums of their own.

    Raises:
        WsiFlError: when the file is missing, damaged, of another format or version, or says that it holds
            more than fits into memory.
    """

    format: ClassVar[str]
    command: str = ""
    rows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not path.exists():
            raise WsiFlError(f"{path}: no such store; make it with `wsi-fl {self.command}`")
        try:
            self._file = opened(path)
        except OSError as error:
            raise WsiFlError(f"{path}: not a readable HDF5 file ({first_line(error)}); {self.mend}") from None
        try:
            check_format(self._file, self.format, path)
            self._load(self._file)
            check_seal(self._file, self.rows)
        except DAMAGE as error:
            self._file.close()
            raise WsiFlError(f"{path}: damaged ({first_line(error)}); {self.mend}") from None
        except MemoryError as error:
            self._file.close()
            raise WsiFlError(f"{path}: {too_large(error)}; {self.mend}") from None
        except BaseException:
            self._file.close()
            raise

    @property
    def site(self) -> str:
        """Return the name of the store's folder, which is that of its site."""
        return self.path.absolute().parent.name

    @property
    def mend(self) -> str:
        """Return what to do about damage."""
        return f"run `wsi-fl {self.command} --site {self.site}` again"

    def _load(self, file: h5py.File) -> None:
        """Read what is held in memory; an error of `DAMAGE` means that the file is damaged."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._file.close()
