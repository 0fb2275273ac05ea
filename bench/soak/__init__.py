"""Memory of every process of a long run, sampled, plotted, with a verdict by its slope."""
