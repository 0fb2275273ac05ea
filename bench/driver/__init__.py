"""How many tokens and responses a second the driver handles, what they cost it, and how long its event loop stands still.

The real driver, scheduler, fleet, buffer, rule and batches; engines, trainer and reward workers are scripted and answer at once, so that
the driver is what limits. Every call goes through the serialization that Ray makes of it (pickle 5 with its buffers copied out of band),
without a cluster; the time that scripted workers take is not counted. Between the cases ``floor`` shows how long the machine
stops a program that does nothing.
"""
