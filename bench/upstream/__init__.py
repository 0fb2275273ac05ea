"""The example configurations of ROLL and RLinf through convert, validate and plan."""
