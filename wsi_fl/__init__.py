"""wsi-fl: federated learning on whole-slide images that hospitals may not share.

The public API is here by name, such as `wsi_fl.Slide` and `wsi_fl.federate`; `wsi_fl.api` lists it.
"""

from importlib import import_module
from typing import Any

__version__ = "1.0.0rc1"


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in (api := import_module("wsi_fl.api")).__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return ["__version__", "api", *import_module("wsi_fl.api").__all__]
