"""Where every array lives: the vocabulary of axes, rule tables, and the plan they make.

Imports no backend and no other package of this project, so a plan costs milliseconds.
"""
