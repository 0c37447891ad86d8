"""Requests, and which of their tokens each step computes. No jax."""

from jpaged.scheduling.beam_search import BeamSearch
from jpaged.scheduling.policies import POLICIES
from jpaged.scheduling.request import UNKNOWN_TOKEN, Request, RequestStatus, Sequence
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.step_plan import StepPlan

__all__ = [
    "POLICIES",
    "UNKNOWN_TOKEN",
    "BeamSearch",
    "Request",
    "RequestStatus",
    "Scheduler",
    "Sequence",
    "StepPlan",
]
