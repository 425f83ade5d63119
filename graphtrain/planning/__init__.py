"""Plan a training step: its memory, communication and time, without the target machine.

`assess` compiles or estimates it; the other modules compare, store and explain the results.
"""
