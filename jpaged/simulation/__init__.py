"""Workloads to measure with: which request comes when, with how many tokens. NumPy alone."""

from jpaged.simulation.workloads import (
    TRACE_FORMATS,
    Workload,
    WorkloadRequest,
    random_workload,
    read_trace,
)

__all__ = ["TRACE_FORMATS", "Workload", "WorkloadRequest", "random_workload", "read_trace"]
