"""The parts that all service processes share: arguments, life cycle, the operate service, activities."""

from __future__ import annotations

from flotilla_core.activities import Activities
from flotilla_core.service.arguments import Arguments
from flotilla_core.service.host import Host, Service
from flotilla_core.service.process import run_service

__all__ = ["Activities", "Arguments", "Host", "Service", "run_service"]
