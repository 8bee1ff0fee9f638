"""Cryptographically secure random numbers, the source of every random bit behind a guarantee.

The bits are the key stream of AES-256 in counter mode (NIST SP 800-38A, section 6.5) with a key of 256 bits of the
operating system. Distinguishing them from coin tosses breaks AES; no number predicts another. Generators for
simulations are predictable: the Mersenne Twister's bits are linear in its state, and 20 000 of them determine all
others, as an attack on the noise of a released proxy demonstrates (`benchmarks/attacks/noise.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from math import pi
from threading import Lock
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_KEY_BYTES = 32
_BLOCK_BYTES = 2**12
"""Bytes per call of the cipher for small numbers: a call for each number would dominate the time."""
_MANTISSA_BITS = 53  # bits of a uniform number, as many as a float64 holds
_NORMALS_PER_BLOCK_CPU, _NORMALS_PER_BLOCK_CUDA = 2**16, 2**22
"""Normal numbers per block: as many as fit a cache, or suit a device. Both are even."""
_MAX_BLOCKS_AHEAD = 4  # blocks on a device at once


class CipherStream:
    """A stream of random numbers in one process; threads may share it, and each number is used once.

    Two streams of one key, bytes[32], give the same numbers. A guarantee needs a key of the operating system.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise UsageError(f"a stream of random numbers needs a key of {_KEY_BYTES} bytes, not {len(key)}")
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
        self._process, self._lock = os.getpid(), Lock()
        self._block, self._at = b"", 0
        self._normals: dict[torch.device, _NormalBlocks] = {}

    @classmethod
    def from_entropy(cls) -> CipherStream:
        """Return a stream with a secret key drawn from the operating system."""
        return cls(os.urandom(_KEY_BYTES))

    @classmethod
    def from_seed(cls, *seed: int | str) -> CipherStream:
        """Return the stream of a seed, for public numbers and for tests: nothing of it is secret."""
        return cls(hashlib.sha256(repr(seed).encode()).digest())

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: original and copy would give the same numbers.

        Raises:
            WsiFlError: always.
        """
        raise WsiFlError("a stream of random numbers has no copies; make a fresh one")

    def random_words(self, n: int) -> NDArray[np.uint64]:
        """Return uint64[n], uniform."""
        self._require_same_process()
        with self._lock:
            return np.frombuffer(self._cipher.update(bytes(8 * n)), "<u8").astype(np.uint64, copy=False)

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return float64[n], uniform in [0, 1), multiples of 2⁻⁵³."""
        numbers: NDArray[np.float64] = np.multiply(
            self.random_words(n) >> np.uint64(64 - _MANTISSA_BITS), 2.0**-_MANTISSA_BITS
        )
        return numbers

    def randbelow(self, n: int) -> int:
        """Return a number of 0, …, n − 1, all exactly equally likely, for n of any length."""
        bits = (n - 1).bit_length()
        length = (bits + 7) // 8
        self._require_same_process()
        with self._lock:
            while True:
                end = self._at + length
                if end > len(self._block):
                    self._block, self._at, end = (self._cipher.update(bytes(max(_BLOCK_BYTES, length))), 0, length)
                value = int.from_bytes(self._block[self._at : end], "little") >> (8 * length - bits)
                self._at = end
                if value < n:
                    return value

    def permutation(self, n: int) -> NDArray[np.int64]:
        """Return int64[n], a permutation of 0, …, n − 1, uniform up to a deviation of n² / 2⁶⁵."""
        return np.argsort(self.random_words(n), kind="stable").astype(np.int64, copy=False)

    def normal(self, n: int) -> NDArray[np.float64]:
        """Return float64[n] of N(0, 1), each with 53 bits of radius and of angle; none is beyond 8.57."""
        import torch

        normals = torch.empty(n, dtype=torch.float64)
        for part, numbers in self._pair_normals([normals]):
            part.copy_(numbers)
        return normals.numpy()

    def draw_normal(self, n: int) -> NDArray[np.float64]:
        """Return float64[n] of N(0, 1), as exact as `normal` and other numbers, without loading PyTorch."""
        half = (n + 1) // 2
        radius = np.sqrt(-2 * np.log(1 - self.uniform(half)))  # of a number in (0, 1]
        angle = 2 * pi * self.uniform(half)
        numbers: NDArray[np.float64] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
        return numbers

    def add_normal(self, tensors: Sequence[Tensor], std: float) -> None:
        """Add a number of N(0, std²) to every number of contiguous tensors on one device, in place.

        Numbers are drawn and added in float64; the sum is rounded to the type of the tensors.
        """
        for part, numbers in self._pair_normals(tensors):
            part.add_(numbers, alpha=std)  # of float32 and float64, in float64

    def draw_ahead(self, n: int, device: torch.device) -> None:
        """Draw up to n normal numbers for the next `add_normal` on a GPU while the GPU is busy."""
        if device.type == "cuda":
            self._require_same_process()
            with self._lock:
                self._normals_on(device).fill_ahead(n, self._cipher)

    def _normals_on(self, device: torch.device) -> _NormalBlocks:
        if device not in self._normals:
            self._normals[device] = _NormalBlocks(device)
        return self._normals[device]

    def _pair_normals(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all parts of flat tensors, each with as many normal numbers float64."""
        self._require_same_process()
        with self._lock:
            for flat in (tensor.view(-1) for tensor in tensors):
                normals, done = self._normals_on(flat.device), 0
                while done < flat.numel():
                    numbers = normals.next_normals(flat.numel() - done, self._cipher)
                    yield flat[done : done + len(numbers)], numbers
                    done += len(numbers)

    def _require_same_process(self) -> None:
        if os.getpid() != self._process:
            raise WsiFlError("a stream of random numbers stays in the process that made it; make a fresh one")


class _NormalBlocks:
    """Normal numbers on a device, in blocks used part by part and refilled."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._at = device, 0
        self._blocks: deque[_NormalBlock] = deque()
        self._free_blocks: list[_NormalBlock] = []

    def fill_ahead(self, n: int, cipher: CipherContext) -> None:
        """Fill blocks up to n numbers, or to the most that are held in memory at once."""
        while (
            len(self._blocks) < _MAX_BLOCKS_AHEAD and sum(len(filled.numbers) for filled in self._blocks) - self._at < n
        ):
            block = self._free_blocks.pop() if self._free_blocks else _NormalBlock(self._device)
            block.fill_block(cipher)
            self._blocks.append(block)

    def next_normals(self, n: int, cipher: CipherContext) -> Tensor:
        """Return float64[m], m ≤ n, unused numbers, valid until the next call."""
        if self._blocks and self._at == len(self._blocks[0].numbers):
            self._free_blocks.append(self._blocks.popleft())
            self._at = 0
        self.fill_ahead(1, cipher)
        numbers = self._blocks[0].numbers
        begin, self._at = self._at, min(self._at + n, len(numbers))
        return numbers[begin : self._at]


class _NormalBlock:
    """A block of normal numbers on a device; memory is allocated once."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"
        n = _NORMALS_PER_BLOCK_CUDA if cuda else _NORMALS_PER_BLOCK_CPU
        self._words = torch.empty(n, dtype=torch.int64, pin_memory=cuda)
        self._zeros, self._bits = bytes(8 * n), self._words.numpy().data.cast("B")
        self._uniform, self.numbers = (torch.empty(n, dtype=torch.float64, device=device) for _ in range(2))
        self._copy_event: torch.cuda.Event | None = None

    def fill_block(self, cipher: CipherContext) -> None:
        """Fill with z = √(−2 ln u) · (cos 2πv, sin 2πv), u in (0, 1] and v in [0, 1) (Box and Muller, 1958)."""
        import torch

        # 1. 53 bits of the cipher for each uniform number; a GPU gets those of the CPU
        if self._copy_event is not None:
            self._copy_event.synchronize()  # the previous words
        cipher.update_into(self._zeros, self._bits)
        words = self._words.to(self._uniform.device, non_blocking=True)
        self._uniform.copy_(words.bitwise_and_(2**_MANTISSA_BITS - 1))
        if self._uniform.is_cuda:
            self._copy_event = torch.cuda.current_stream(self._uniform.device).record_event()
        # 2. √(−2 ln u) and 2πv
        u, v = self._uniform.chunk(2)
        radius = u.add_(1).mul_(2.0**-_MANTISSA_BITS).log_().mul_(-2).sqrt_()
        angle = v.mul_(2 * pi * 2.0**-_MANTISSA_BITS)
        # 3. cosine and sine make two independent normal numbers
        cosine, sine = self.numbers.chunk(2)
        torch.cos(angle, out=cosine).mul_(radius)
        torch.sin(angle, out=sine).mul_(radius)
