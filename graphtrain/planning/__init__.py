"""What a training step will hold, send and wait for, before any machine is rented.

`assess` asks the compiler; the rest compares, keeps and explains its answers.
"""
