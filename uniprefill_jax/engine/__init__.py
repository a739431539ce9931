"""Continuous batching: requests, their scheduling, and an executor that prefills in chunks while others decode."""
