"""How fast RLJob plans, and how that grows, beside RLinf 0.3.0's own planner."""
