import numpy as np
from numpy.typing import NDArray

def scatter(
    tile: NDArray[np.uint8], parts: NDArray[np.int64], patches: list[NDArray[np.uint8]], /
) -> None: ...
