"""Linear generators of bits: their minimal polynomials, their outputs as equations over GF(2), and elimination.

Polynomials over GF(2) are integers whose bit i is the coefficient of xⁱ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_WORD = 32


@dataclass(frozen=True)
class Twister:
    """A Mersenne Twister of 32-bit words (Matsumoto and Nishimura, 1998), with the tempering of MT19937.

    Attributes:
        n, m, r, a: x[t+n] = x[t+m] + (upper 32−r bits of x[t], lower r bits of x[t+1]) · A, where a is A's last row.
    """

    n: int
    m: int
    r: int
    a: int

    @property
    def n_bits(self) -> int:
        """Return the number of bits of its state."""
        return _WORD * self.n - self.r

    def words(self, first: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
        """Return `count` words, uint32[count], that begin with the given n; outputs are these, tempered."""
        x = np.empty(max(count, self.n), np.uint32)
        x[: self.n] = first
        lower = np.uint32((1 << self.r) - 1)
        for t in range(self.n, count, self.n - self.m):
            k = min(self.n - self.m, count - t)
            old = t - self.n
            y = (x[old : old + k] & ~lower) | (x[old + 1 : old + k + 1] & lower)
            x[t : t + k] = x[old + self.m : old + self.m + k] ^ (y >> 1) ^ (y & 1) * np.uint32(self.a)
        return x[:count]


def tempered(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the outputs of a twister with these words."""
    y = words.copy()
    y ^= y >> 11
    y ^= (y << 7) & np.uint32(0x9D2C5680)
    y ^= (y << 15) & np.uint32(0xEFC60000)
    y ^= y >> 18
    return y


def minimal_polynomial(bits: Iterable[int]) -> int:
    """Return the characteristic polynomial of the shortest linear recurrence that makes these bits.

    Its degree is their linear complexity: half their number where they are random, at most the state's size where a
    linear generator made them. Reference: Massey, 1969.
    """
    connection, before, degree, gap, past = 1, 1, 0, 1, 0
    for t, bit in enumerate(bits):
        past = past << 1 | int(bit)  # bit i is that of time t − i
        if (connection & past).bit_count() & 1:
            kept = connection
            connection ^= before << gap
            if 2 * degree <= t:
                degree, before, gap = t + 1 - degree, kept, 0
        gap += 1
    return int(f"{connection:0{degree + 1}b}"[::-1], 2)


def linear_complexity(bits: Iterable[int]) -> int:
    """Return the degree of the `minimal_polynomial`."""
    return minimal_polynomial(bits).bit_length() - 1


class Field:
    """Polynomials modulo one that has no factors."""

    def __init__(self, modulus: int) -> None:
        self.degree = modulus.bit_length() - 1
        self._modulus = modulus
        self._multiples = [0]  # of the modulus, by their 8 bits from x^degree on
        for top in range(1, 256):
            one = modulus << (top.bit_length() - 1)
            self._multiples.append(one ^ self._multiples[top ^ one >> self.degree])

    def shifted(self, a: int, k: int) -> int:
        """Return xᵏ · a."""
        while k > 0:
            a <<= min(k, 8)
            a ^= self._multiples[a >> self.degree]
            k -= 8
        return a

    def product(self, a: int, b: int) -> int:
        """Return a · b."""
        out = 0
        for i in reversed(range(b.bit_length())):
            out = self.shifted(out, 1) ^ (a if b >> i & 1 else 0)
        return out

    def inverse(self, a: int) -> int:
        """Return 1 / a, by Euclid."""
        u, v, g, h = a, self._modulus, 1, 0
        while u != 1:
            j = u.bit_length() - v.bit_length()
            if j < 0:
                u, v, g, h, j = v, u, h, g, -j
            u ^= v << j
            g ^= h << j
            if not u:
                raise ZeroDivisionError("a polynomial shares a factor with the modulus")
        return g


class Sequences:
    """The sequences of bits that a linear generator makes, as multiples of one of them.

    All sequences s with the characteristic polynomial P are s_t = φ(h xᵗ mod P), where φ is the same linear map for
    all that one state makes, and h tells one bit of the output from another. φ(xᵗ) is bit 23 of the tempered outputs.
    The unknowns are φ(1), φ(x), …: the first bits 23. So the coefficients of an equation about the output t are those
    of h xᵗ mod P.
    """

    def __init__(self, twister: Twister) -> None:
        self.twister = twister
        n, degree = twister.n, twister.n_bits
        first = np.random.default_rng(0).integers(1 << _WORD, size=n, dtype=np.uint32)
        self._words = twister.words(first, n + 2 * degree)[n:]  # what is made; of x[0] not all bits are the state's
        self._outputs = tempered(self._words)
        base = self._outputs >> 23 & 1
        modulus = minimal_polynomial(base.tolist())
        if modulus.bit_length() - 1 != degree:
            raise ValueError(f"the twister's minimal polynomial is not of degree {degree}")
        self._modulus, self._field = modulus, Field(modulus)
        self._inverse = self._field.inverse(self._numerator(base))

    @property
    def n_bytes(self) -> int:
        """Return the width of an equation, whole words of 64 bits with one bit to spare for the right-hand side."""
        return 8 * -(-(self._field.degree + 1) // 64)

    def equations(self, times: NDArray[np.int64], *, bits: Sequence[int]) -> NDArray[np.uint8]:
        """Return the coefficients of the sum of some bits of outputs, packed: uint8[len(times), n_bytes].

        Args:
            times: increasing.
            bits: of the tempered output, 0 the least.
        """
        row, before = 0, 0
        for bit in bits:
            row ^= self._multiple(self._outputs >> bit & 1)
        rows = bytearray()
        for t in times.tolist():
            row, before = self._field.shifted(row, t - before), t
            rows += row.to_bytes(self.n_bytes, "little")
        return np.frombuffer(rows, np.uint8).reshape(len(times), self.n_bytes)

    def first_words(self, unknowns: int) -> NDArray[np.uint32]:
        """Return the first n words, before tempering, uint32[n], of the state with these unknowns as bits."""
        words = np.zeros(self.twister.n, np.uint32)
        for bit in range(_WORD):
            row = self._multiple(self._words >> bit & 1)
            for t in range(len(words)):
                words[t] |= ((row & unknowns).bit_count() & 1) << bit
                row = self._field.shifted(row, 1)
        return words

    def _multiple(self, sequence: NDArray[np.integer[Any]]) -> int:
        """The h of a sequence."""
        return self._field.product(self._numerator(sequence), self._inverse)

    def _numerator(self, sequence: NDArray[np.integer[Any]]) -> int:
        """A of Σ s_t x^(−t−1) = A / P."""
        out = 0
        for t in np.flatnonzero(sequence[: self._field.degree]).tolist():
            out ^= self._modulus >> (t + 1)
        return out


class Solved(NamedTuple):
    """What elimination found.

    Attributes:
        rank: of the equations.
        contradictions: how many of the equations beyond the rank do not hold where the others do.
        bits: the unknowns, where the rank is full.
    """

    rank: int
    contradictions: int
    bits: int


def solve(equations: NDArray[np.uint8], right: NDArray[np.bool_], n_unknowns: int) -> Solved:
    """Solve equations over GF(2).

    Args:
        equations: [m, a multiple of 8], packed with the least bit first; all bits after the unknowns are 0.
        right: [m].
    """
    table = equations.copy()
    table[:, n_unknowns // 8] |= right.astype(np.uint8) << n_unknowns % 8
    wide = table.view("<u8")
    columns = _eliminate(wide, n_unknowns)
    rank, bits = len(columns), 0
    for row, column in zip(table[:rank][::-1], reversed(columns), strict=True):
        coefficients = int.from_bytes(row.tobytes(), "little")
        if (coefficients & (bits | 1 << n_unknowns)).bit_count() & 1:
            bits |= 1 << column
    left = table[rank:, n_unknowns // 8] >> n_unknowns % 8 & 1
    return Solved(rank, int(left.sum()), bits)


_ROWS = 512
"""As many rows at a time as a cache holds."""


def _eliminate(wide: NDArray[np.uint64], n_columns: int) -> list[int]:
    """Bring rows into echelon form in place, eight columns at a time, and return the column of each pivot.

    The pivots of eight columns have 256 sums, so that a look-up and one addition clear eight columns of a row (the
    "method of four Russians").
    """
    table = wide.view(np.uint8)
    columns: list[int] = []
    for byte in range(-(-n_columns // 8)):
        top, left = len(columns), byte // 8
        pivots = _pivots(wide[top:], table[top:, byte], min(8, n_columns - 8 * byte))
        columns += [8 * byte + bit for bit in pivots]
        sums = np.zeros((256, wide.shape[1] - left), np.uint64)
        rows = dict(zip(pivots, wide[top:, left:], strict=False))
        for bit in range(8):
            sums[1 << bit : 2 << bit] = sums[: 1 << bit] ^ rows.get(bit, 0)
        for start in range(len(columns), len(wide), _ROWS):
            some = slice(start, start + _ROWS)
            wide[some, left:] ^= sums[table[some, byte]]
    return columns


def _pivots(rows: NDArray[np.uint64], block: NDArray[np.uint8], n_bits: int) -> list[int]:
    """Bring rows to the top that are unit vectors on the bits they are returned for, of one column of bytes.

    Args:
        block: that column, a view of `rows`.
    """
    found: list[int] = []
    rest = block.copy()  # as it will be where the pivots found so far are cleared
    for bit in range(n_bits):
        k = len(found)
        at = k + int((rest[k:] >> bit & 1).argmax()) if k < len(rest) else k
        if at == len(rest) or not rest[at] >> bit & 1:
            continue
        rows[[k, at]], rest[[k, at]] = rows[[at, k]], rest[[at, k]]
        for j, other in enumerate(found):
            if block[k] >> other & 1:
                rows[k] ^= rows[j]
        for j in range(k):
            if block[j] >> bit & 1:
                rows[j] ^= rows[k]
        rest[rest >> bit & 1 == 1] ^= rest[k]
        found.append(bit)
    return found
