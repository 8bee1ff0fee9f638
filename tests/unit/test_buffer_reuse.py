"""Buffers are reused only when no array uses them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from wsi_fl.system.direct_io import ALIGNMENT, BufferPool

MB = 1 << 20


def place(array):
    return array.__array_interface__["data"][0]


def test_a_buffer_is_reused_once_no_array_shares_it():
    memory = BufferPool(capacity=2)
    array = memory.empty((4, MB), np.uint8)
    assert place(array) % ALIGNMENT == 0 and array.flags.writeable and array.flags.c_contiguous
    at, view, tensor = place(array), array[1:].reshape(-1)[5:9], torch.from_numpy(array[2])
    del array
    assert place(memory.empty((4, MB), np.uint8)) != at
    del view
    assert place(memory.empty((4, MB), np.uint8)) != at
    row = tensor[7:9]
    del tensor
    assert place(memory.empty((4, MB), np.uint8)) != at
    del row
    places = {place(memory.empty((MB,), np.float32)) for _ in range(2)}
    assert at in places


def test_arrays_in_use_keep_their_values_while_buffers_are_reused():
    memory, kept = BufferPool(capacity=3), []

    def work(seed):
        for k in range(40):
            array, value = memory.empty((3, MB), np.uint8), (seed * 40 + k) % 251
            array[:] = value
            if k % 7 == 0:
                kept.append((value, array[1:]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(kept) == 24 and all((array == value).all() for value, array in kept)


def test_the_pool_keeps_buffers_up_to_its_capacity_and_no_small_arrays():
    memory = BufferPool(capacity=2)
    for shape in ((0, 5), (7, 3), ()):
        array = memory.empty(shape, np.float32)
        assert array.shape == shape and array.dtype == np.float32
    del array
    assert memory._free == []
    arrays = [memory.empty((2, MB), np.uint8) for _ in range(5)]
    assert len({place(array) for array in arrays}) == 5
    del arrays
    assert len(memory._free) == 2
