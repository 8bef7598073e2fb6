"""Is the other package there, and in a version that the adapter was tried with?"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def require(package: str, tried: Sequence[str], *, module: str, asked_by: str) -> str:
    """The installed version of a package.

    Args:
        package: its name on PyPI.
        tried: the versions that the adapter is tested with.
        module: what is imported, for the message.
        asked_by: the function that needs it.

    Raises:
        ImportError: it is not installed.
        NotImplementedError: another version.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"{asked_by}: {module} is not installed; pip install {package}=={tried[-1]}", name=module
        ) from None
    if found not in tried:
        raise NotImplementedError(
            f"{asked_by}: {package} {found} is installed; its interior changes between versions, and this adapter was "
            f"tried with {', '.join(tried)}: pip install {package}=={tried[-1]}"
        )
    return found
