"""Fuzzers of what comes from outside, their corpora, and what both share with the tests."""
