"""Test data: kept sets of the released kernel and the rotary settings of published models."""
