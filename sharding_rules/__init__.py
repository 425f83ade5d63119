"""Sharding of every array: axis names, rule tables, and the plan that results from them.

Imports no backend and no other package of this project, so that making a plan takes milliseconds.
"""
