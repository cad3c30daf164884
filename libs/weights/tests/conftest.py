"""Members of weight groups show the credential of one stack."""

from __future__ import annotations

from flotilla_testing.credentials import hand_ours_down

hand_ours_down()
