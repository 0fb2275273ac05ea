"""How often the model of examples/frozen-lake.yaml crosses the lake while it trains, over several seeds."""
