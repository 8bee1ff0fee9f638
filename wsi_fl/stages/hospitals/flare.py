"""The one door to NVIDIA FLARE."""

from __future__ import annotations

import nvflare  # noqa: F401
