"""Faults by the hundred at random moments, in three layers; everything is as promised afterwards, or failed with the true cause."""
