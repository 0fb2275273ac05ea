"""What the report promises for its best advice, beside what came of it."""
