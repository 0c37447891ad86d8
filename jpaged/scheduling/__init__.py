"""Requests, and which of their tokens each step computes. No jax."""

from jpaged.scheduling.request import Request, RequestStatus, Sequence
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.step_plan import StepPlan

__all__ = ["Request", "RequestStatus", "Scheduler", "Sequence", "StepPlan"]
