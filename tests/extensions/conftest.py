"""What all tests of the extensions share: a look at the installed packages, which is slow."""

from functools import cache

import pytest

from wsi_fl import plugins
from wsi_fl.hospitals.plans import installed_code


@pytest.fixture(scope="session", autouse=True)
def one_installation():
    """Read the installed packages, and the code of each method, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "plugin_versions", cache(plugins.plugin_versions))
        patch.setattr(installed_code, "code_digest", cache(installed_code.code_digest))
        yield
