"""What agents cost: environment steps per second and core, turns with a real engine, and how much of their history stays cached.

Without an engine every reply is answered at once with tokens that name an action, so that what is measured is environment, codec and
worker. With one, driver, engine and worker are processes of their own.
"""
