"""The members of every weight group have the credential of one stack."""

from __future__ import annotations

from flotilla_core.config import BindConfig
from flotilla_core.rpc.interface import hand_down
from flotilla_testing.credentials import ours

hand_down(BindConfig(), ours())
