"""What a plan will cost, by arithmetic: memory, traffic, time. Imports no JAX, so it can search.

The compiler's answer is better where there is one (`graphtrain.planning`); this one takes
microseconds, and says of every number what it is made of.
"""
