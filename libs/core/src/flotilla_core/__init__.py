"""Configuration, errors, ids, gRPC, NATS and telemetry shared by every service."""

from __future__ import annotations

import os

# gRPC reads this once, when it is first imported. Its own lines say less than our errors, in another format.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
