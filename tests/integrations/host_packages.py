"""Packages that our adapters are for: imported where they are installed, and given the JAX settings they expect."""

import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version

import pytest

# These packages warn of their own and of each other's deprecations, and promote dtypes and ranks.
as_in_the_host = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("lenient_jax"),
]


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def import_host(module, package, tried):
    """The module; skips where the package is missing or of a version that the adapter does not know."""
    if installed(package) not in tried:
        pytest.skip(f"needs {package} {' or '.join(tried)}; installed: {installed(package)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def only_without(package):
    return pytest.mark.skipif(installed(package) is not None, reason=f"{package} is installed")
