"""Time-division: components that share devices take turns in their memory."""
