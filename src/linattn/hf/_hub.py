"""Where a model of the Hugging Face hub is read from: it is asked once, where each file would be tried five times."""

from __future__ import annotations

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

_SECONDS = 10


def hub_source(name: str) -> str:
    """The name itself where the hub has it; where it cannot be reached, the folder of its local cache.

    Raises ValueError if there can be no such model, OSError if it is neither to be reached nor in the cache.
    """
    try:
        HfApi().model_info(name, timeout=_SECONDS)
    except HFValidationError:
        raise ValueError(
            f"{name} is no folder here, no GGUF file, and no name as OWNER/MODEL; give a folder with a saved model, or "
            "a Hugging Face name"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the Hugging Face hub has no model {name} that may be read from here; give another name, or log in where "
            "the model is gated"
        ) from None
    # Errors of the network are of the client's own client, which its versions change: whatever fails is no answer, and
    # the cache then has the model or says that it has not.
    except Exception:
        return _cached(name)
    return name


def _cached(name: str) -> str:
    """The folder of the local cache."""
    try:
        return snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError:
        raise OSError(
            f"{name} is no folder here and not in the local cache of the Hugging Face hub, which cannot be reached; "
            "give a folder with a saved model, or fetch the model once where there is a network"
        ) from None
