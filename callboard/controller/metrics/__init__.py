"""Metrics: Prometheus figures of the controller.

Gauges are read from the ledger when somebody scrapes, so they can't drift and series of things that are gone disappear;
counts and durations are taken from the event log as it grows (docs/scheduling.md, Metrics).
"""
