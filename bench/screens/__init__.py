"""Every page that RLJob makes, in a real browser: light and dark, wide and narrow."""
