"""The examples that train on a CPU, over several seeds: does each of them learn?"""
