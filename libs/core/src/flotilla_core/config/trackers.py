"""Section `trackers` of `run.yaml`: where a run shows its metrics beside its own files.

Invariants: no key, token or password is part of a configuration, for it is saved with the run and shown. They come from
the environment of the coordinator, or from a file that the configuration only names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from flotilla_core.config.model import ConfigModel, kind_of

DIRECT = "none"
"""The value of `proxy` that uses none, whatever the environment says."""
SECRETS = frozenset({"api_key", "key", "token", "password", "hf_token", "username"})
"""Names under which other programs take secrets."""


def _without_credentials(url: str) -> str:
    if "@" in urlsplit(url).netloc:
        raise ValueError(
            "the address carries credentials, and a configuration is saved: write them to a file of mode 0600 and "
            "name it in secrets_file"
        )
    return url


Address = Annotated[str, AfterValidator(_without_credentials)]
Proxy = Annotated[
    str, Field(pattern=r"^((https?|socks5h?)://.+|none)$"), AfterValidator(_without_credentials)
]


class TrackerConfig(ConfigModel):
    """The keys that every tracker has."""

    samples: int = Field(default=8, ge=0, le=1000)
    """Samples in each table, from the best reward to the worst; 0 sends none."""
    samples_every_steps: int = Field(default=10, ge=1, le=10_000_000)
    """Steps between two tables of samples."""


class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    type: Literal["tensorboard"] = "tensorboard"
    directory: Path | None = None
    """Folder that gets a folder for each run; empty takes the run directory."""


class HostedTrackerConfig(TrackerConfig):
    """The keys of trackers that may be reached over a network."""

    proxy: Proxy | None = None
    """Proxy of this tracker alone, http://host:port; `none` uses none, empty takes that of the environment."""
    secrets_file: Path | None = None
    """File (mode 0600) of NAME=value lines that this tracker alone gets as its environment: keys, a proxy with a
    password."""

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, values: Any) -> Any:
        for key in SECRETS & set(values) if isinstance(values, dict) else ():
            raise ValueError(
                f"{key} is no key of a configuration, which is saved: set it in the environment of `flotilla up`, or "
                "write it to a file of mode 0600 and name that in secrets_file"
            )
        return values


class WandbConfig(HostedTrackerConfig):
    """Weights & Biases; its key is WANDB_API_KEY."""

    type: Literal["wandb"] = "wandb"
    project: str = Field(default="flotilla", min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team; empty takes the default of the key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files into the run directory; `wandb sync` sends them later."""
    base_url: Address | None = None
    """Server of your own; empty takes the public one."""


class MlflowConfig(HostedTrackerConfig):
    """MLflow; its credentials are MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    type: Literal["mlflow"] = "mlflow"
    experiment: str = Field(default="flotilla", min_length=1)
    """Experiment of the run."""
    tracking_uri: Address | None = None
    """Server, or file:/folder without one; empty takes MLFLOW_TRACKING_URI, else a folder of the stack."""


class TrackioConfig(HostedTrackerConfig):
    """Trackio: a database on this host, or a Space, whose key is HF_TOKEN."""

    type: Literal["trackio"] = "trackio"
    project: str = Field(default="flotilla", min_length=1, pattern=r"^[A-Za-z0-9 _-]+$")
    """Project of the run."""
    directory: Path | None = None
    """Folder of the databases; empty takes TRACKIO_DIR, else trackio's own in the home folder."""
    space_id: str | None = None
    """Space that gets the run, owner/name; empty keeps it on this host."""


TrackerSection = Annotated[
    Annotated[TensorBoardConfig, Tag("tensorboard")]
    | Annotated[WandbConfig, Tag("wandb")]
    | Annotated[MlflowConfig, Tag("mlflow")]
    | Annotated[TrackioConfig, Tag("trackio")],
    Discriminator(kind_of),
]


def named_trackers(value: Any) -> Any:
    """Return the list with each bare name written as a section; one of a type at most."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    sections = [{"type": item} if isinstance(item, str) else item for item in value]
    kinds = [kind_of(section) for section in sections]
    for kind in kinds:
        if kind is not None and kinds.count(kind) > 1:
            raise ValueError(f"{kind} is named twice: a run shows itself once in each tracker")
    return sections
